"""`make eks-up`: six steps in order, with the names of the settings, and again after a step that failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra.tests.programs import Programs

SCRIPT = Path(__file__).parents[1] / "eks_up.sh"
SETTINGS = """\
REGION=us-west-2
CLUSTER_NAME=mine
REGISTRY=111122223333.dkr.ecr.us-west-2.amazonaws.com
TRAINIUM_SHAPE=trn2.48xlarge
"""
STEPS = [
    "make --no-print-directory infra-up STACK=eks",
    "aws eks update-kubeconfig --region us-west-2 --name mine",
    "make --no-print-directory addons",
    "aws ecr get-login-password --region us-west-2",
    "docker login --username AWS --password-stdin 111122223333.dkr.ecr.us-west-2.amazonaws.com",
    "make --no-print-directory images VARIANT=trn2 PUSH=111122223333.dkr.ecr.us-west-2.amazonaws.com",
    "make --no-print-directory cluster-up OVERLAY={overlay}",
]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path, monkeypatch)
    for name in ("dirname", "env", "head", "id", "sed", "uname"):
        found.add_real(name)
    for name in ("make", "aws", "docker", "kubectl", "pants", "skopeo"):
        found.add(name)
    found.add("helm", "echo v3.19.0")
    found.add("terraform", "echo Terraform v1.10.0")
    return found


def steps(programs: Programs) -> list[str]:
    """Calls but those that look which programs are here."""
    return [call for call in programs.calls if "version" not in call]


def run(overlay: Path, **variables: str) -> int:
    environment = {**os.environ, "OVERLAY": str(overlay), "VARIANT": "trn2", **variables}
    return subprocess.run([SCRIPT], env=environment, check=False, timeout=60).returncode


def test_it_takes_the_steps_in_order(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "settings.env").write_text(SETTINGS, encoding="utf-8")
    assert run(tmp_path) == 0
    # Two programs of one pipe start in any order.
    assert sorted(steps(programs)) == sorted(step.format(overlay=tmp_path) for step in STEPS)
    assert [call for call in programs.calls if call.startswith("make")] == [
        step.format(overlay=tmp_path) for step in STEPS if step.startswith("make")
    ]


def test_a_failed_step_ends_it_with_its_exit_code(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "settings.env").write_text(SETTINGS, encoding="utf-8")
    programs.add("make", '[[ "$*" != *addons ]] || exit 75')
    assert run(tmp_path) == 75
    assert programs.calls[-1] == STEPS[2]


@pytest.mark.parametrize(
    ("name", "value", "code", "calls"), [("DRY_RUN", "1", 0, STEPS[:1]), ("STACK", "batch", 2, [])]
)
def test_a_dry_run_ends_after_the_plan_and_another_stack_before_it(
    programs: Programs, tmp_path: Path, name: str, value: str, code: int, calls: list[str]
) -> None:
    assert run(tmp_path, **{name: value}) == code
    assert steps(programs) == calls


@pytest.mark.parametrize(
    ("name", "answer"),
    [("helm", "echo v3.12.0"), ("docker", "exit 1"), ("skopeo", "exit 1"), ("kubectl", "exit 1")],
    ids=["an old helm", "no engine of Docker", "no skopeo", "no kubectl"],
)
def test_what_a_later_step_lacks_is_asked_for_before_anything_is_paid(
    programs: Programs, tmp_path: Path, name: str, answer: str
) -> None:
    programs.add(name, answer)
    assert (run(tmp_path), steps(programs)) == (4, [])
    assert (run(tmp_path, DRY_RUN="1"), steps(programs)) == (0, STEPS[:1]), "the price needs Terraform alone"
