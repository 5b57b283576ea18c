"""The commands with STACK=batch: what it costs, what infra-up writes, and which commands do not know it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infra.inputs import read_inputs, read_variables
from infra.stack import STACK
from infra.tests.programs import Programs
from tests.command import call

BATCH = STACK.parent / "batch"
GIVEN = BATCH / "tests/configs/given.txt"


@pytest.fixture
def on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK", "batch")
    monkeypatch.setenv("TF_VAR_region", "us-west-2")
    monkeypatch.setenv("TF_VAR_zone_id", "usw2-az4")


@pytest.mark.usefixtures("on_batch")
def test_batch_itself_costs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    done = call(capfd, "infra.__main__", "cost")

    assert done.returncode == 0, done.stderr
    assert "EKS control plane" not in done.stdout
    assert "core" not in done.stdout
    assert "1 x NAT gateway" in done.stdout
    assert "FSx for Lustre, 1200 GiB" in done.stdout
    assert "4 x trn1.32xlarge (trainium)" in done.stdout


@pytest.mark.usefixtures("on_batch")
def test_what_is_there_already_is_not_paid_for_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_VAR_config", str(GIVEN))

    done = call(capfd, "infra.__main__", "cost")

    assert done.returncode == 0, done.stderr
    assert "NAT gateway   " not in done.stdout
    assert "FSx for Lustre" not in done.stdout


def test_the_defaults_are_the_stacks() -> None:
    inputs = read_inputs(read_variables(None, BATCH), needs_place=False, folder=BATCH)

    assert not inputs.has_cluster
    assert (inputs.trainium_shape, inputs.cpu_shape, inputs.core_nodes) == ("trn1.32xlarge", "m7i.8xlarge", 0)
    assert (inputs.has_network, inputs.fsx_gib) == (True, 1200)


@pytest.mark.usefixtures("on_batch")
@pytest.mark.parametrize("command", ["down", "leftovers", "preflight"])
def test_a_command_that_would_misread_it_says_so(capfd: pytest.CaptureFixture[str], command: str) -> None:
    done = call(capfd, "infra.__main__", command)

    assert done.returncode == 2
    assert f"make infra-{command} knows the EKS stack alone" in done.stderr
    assert "infra/stacks/batch/README.md" in done.stderr


@pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform on PATH")
def test_up_writes_what_deployments_read(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, programs: Programs, tmp_path: Path
) -> None:
    """With a stack that has nothing of AWS."""
    programs.add_real("terraform")
    folder, config = tmp_path / "stacks/batch", tmp_path / "config.txt"
    folder.mkdir(parents=True)
    declared = [
        f'variable "{name}" {{ default = {default} }}'
        for name, default in {
            "region": '"us-west-2"',
            "name": '"millrace"',
            "zone_id": '"usw2-az4"',
            "trainium": '{ shape = "trn1.32xlarge", max_nodes = 4 }',
            "cpu_nodes": '{ shape = "m7i.8xlarge", max_nodes = 2 }',
            "fsx": "{ gib = 1200, throughput = 250 }",
            "budget": "{}",
        }.items()
    ]
    (folder / "variables.tf").write_text("\n".join(declared), encoding="utf-8")
    main = (
        'module "network" { source = "./network" }\noutput "config" { value = "REGION=us-west-2\\nNAME=millrace\\n" }\n'
    )
    (folder / "main.tf").write_text(main, encoding="utf-8")
    (folder / "network").mkdir()
    (folder / "network/main.tf").write_text('resource "terraform_data" "subnet" {}\n', encoding="utf-8")
    for name, value in (("STACK", str(folder)), ("CONFIG", str(config)), ("YES", "1")):
        monkeypatch.setenv(name, value)

    done = call(capfd, "infra.__main__", "up")

    assert done.returncode == 0, done.stderr
    assert config.read_text(encoding="utf-8") == "REGION=us-west-2\nNAME=millrace\n"
    assert "make deploy-stage STAGE=tokenizer TARGET=batch" in done.stdout
