"""The commands with STACK=batch, before anything of it is made: what it costs, and what the account lacks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.inputs import read_inputs, read_variables
from infra.stack import STACK
from infra.tests.conftest import REGION, Aws
from infra.tests.moto_batch import make_queue
from infra.tests.programs import Programs
from services.common.lustre import default_lustre_size
from services.common.recipe import STAGES
from tests.command import call

ZONE = "usw2-az4"
TAG = "1.0.0-neuron"
BATCH = STACK.parent / "batch"
GIVEN = BATCH / "tests/configs/given.txt"


@pytest.fixture
def on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK", "batch")
    monkeypatch.setenv("TF_VAR_region", REGION)
    monkeypatch.setenv("TF_VAR_zone_id", ZONE)


@pytest.mark.usefixtures("on_batch")
def test_batch_itself_costs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    done = call(capfd, "infra.__main__", "cost")

    assert done.returncode == 0, done.stderr
    assert "EKS control plane" not in done.stdout
    assert "core" not in done.stdout
    assert "1 x NAT gateway" in done.stdout
    assert "FSx for Lustre, 1,200 GiB" in done.stdout
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
    assert (inputs.has_network, inputs.fsx) == (True, default_lustre_size())


@pytest.fixture
def account(on_batch: None, aws: Aws, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Aws:
    """One whose quotas hold four Trainium nodes and four others."""
    programs.add("terraform", """echo '{"addresses_per_node": {"value": 24}}'""")
    monkeypatch.setenv("TAG", TAG)
    aws.quotas |= {
        "Running On-Demand Trn instances": 512,
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 128,
    }
    return aws


def push(aws: Aws, repositories: list[str]) -> None:
    ecr = aws.client("ecr")
    for name in repositories:
        ecr.create_repository(repositoryName=name)
        manifest = f'{{"schemaVersion": 2, "config": {{"digest": "sha256:{name}"}}}}'
        media = "application/vnd.oci.image.manifest.v1+json"
        ecr.put_image(repositoryName=name, imageManifest=manifest, imageManifestMediaType=media, imageTag=TAG)


def make_subnet(aws: Aws, zone: str = ZONE) -> str:
    ec2 = aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    made = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", AvailabilityZoneId=zone)
    return str(made["Subnet"]["SubnetId"])


def test_preflight_of_an_account_in_which_everything_fits(capfd: pytest.CaptureFixture[str], account: Aws) -> None:
    subnet = make_subnet(account)
    make_queue(account.client, "millrace-cpu")
    make_queue(account.client, "millrace-trainium", [subnet])
    make_queue(account.client, "other-trainium", stack="other")
    push(account, [f"millrace/{stage}" for stage in STAGES])

    done = call(capfd, "infra.__main__", "preflight")

    assert done.returncode == 0, done.stderr
    assert "instances: 128 vCPU, 0 in use by others, 4 x m7i.8xlarge take 128" in done.stdout
    assert f"{subnet} has 251 free, 96 are needed for 4 nodes that are not up yet" in done.stdout
    assert "queues      millrace-cpu takes jobs\n            millrace-trainium takes jobs\n" in done.stdout
    assert "3 of 3 tags are in ECR" in done.stdout
    assert "head" not in done.stdout
    assert "other-" not in done.stdout


def test_preflight_before_the_first_infra_up(capfd: pytest.CaptureFixture[str], account: Aws) -> None:
    done = call(capfd, "infra.__main__", "preflight")

    assert done.returncode == 0, done.stderr
    assert "no Trainium subnet yet" in done.stdout
    assert "0 of 3 tags are in ECR; not yet millrace/compiler" in done.stdout


def test_preflight_names_a_queue_that_gives_no_job_to_nodes(capfd: pytest.CaptureFixture[str], account: Aws) -> None:
    """Batch itself says it nowhere but there: the jobs stay RUNNABLE."""
    make_queue(account.client, "millrace-trainium", [make_subnet(account, zone="usw2-az1")])
    account.client("batch").update_job_queue(jobQueue="millrace-trainium", state="DISABLED")
    push(account, [f"millrace/{stage}" for stage in STAGES])

    done = call(capfd, "infra.__main__", "preflight")

    assert done.returncode == 4
    assert "2 of what is needed is not there" in done.stderr
    assert "got       job queue millrace-trainium is DISABLED and VALID: " in done.stderr
    assert "where     the compute environment of job queue millrace-trainium, subnet-" in done.stderr
    assert f"expected  one subnet in {ZONE}" in done.stderr


def test_preflight_looks_into_a_registry_that_is_given(
    capfd: pytest.CaptureFixture[str], account: Aws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config.txt"
    config.write_text(f"REGION={REGION}\nECR_REPO=123456789012.dkr.ecr.{REGION}.amazonaws.com/ml/llama\n")
    monkeypatch.setenv("TF_VAR_config", str(config))
    push(account, ["ml/llama/tokenizer", "ml/llama/compiler"])

    done = call(capfd, "infra.__main__", "preflight")

    assert done.returncode == 4
    assert "no repository for ml/llama/trainer" in done.stderr
    assert "next      aws ecr create-repository --repository-name ml/llama/trainer" in done.stderr
    assert "1 of what is needed is not there" in done.stderr
