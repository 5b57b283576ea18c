"""The three stages on two nodes each, by the job definitions that the deploy tool registers: the same artifacts as in
plain processes, whatever is lost on the way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.tests.batchsim.conftest import Submit
from infra.tests.batchsim.container import REPOSITORY
from infra.tests.batchsim.job import Job, JobDefinition
from infra.tests.batchsim.network import Network
from infra.tests.batchsim.stages import define_stage, make_root
from services.common.artifacts.__main__ import read_manifest
from services.common.recipe.schema import Stage
from services.common.testing.waiting import wait_until
from services.trainer.tests.runs import checkpoints, read_run, state_hash
from tests.small import write_notes, write_small_recipe

pytestmark = [pytest.mark.batch, pytest.mark.timeout(1800)]

JOB_SECONDS = 900
LAST_STEP = 200
STAGES: dict[Stage, tuple[str, ...]] = {
    "tokenizer": (),
    "compiler": (),
    "trainer": (f"--train.max_steps={LAST_STEP}",),
}
"""Arguments of each stage besides recipe and root. The training is long enough to be disturbed twice."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_small_recipe(folder / "small.toml", str(write_notes(folder / "notes")))


@pytest.fixture(scope="module")
def inline(folder: Path, recipe: Path) -> Path:
    """A root that the three commands filled in plain processes of this machine."""
    root = folder / "inline"
    for stage, arguments in STAGES.items():
        command = [sys.executable, "-m", f"services.{stage}", "--recipe", str(recipe), "--root", str(root)]
        environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--launch", "inline", *arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def batch(folder: Path, recipe: Path, network: Network) -> Path:
    """A root that three jobs of two nodes filled, which both succeed in the first attempt."""
    root = make_root(folder / "batch")
    for stage in STAGES:
        job = Job(network, define(stage, recipe, root))
        try:
            assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
            assert [each.poll() for each in job.attempts[0].nodes.values()] == [0, 0], job.logs
        finally:
            job.close()
    return root


def define(stage: Stage, recipe: Path, root: Path) -> JobDefinition:
    return define_stage(stage, recipe, root, *STAGES[stage])


@pytest.fixture
def untrained(batch: Path, tmp_path: Path) -> Path:
    """A root with the corpus and the cache."""
    root = make_root(tmp_path / "fsx")
    for kind in ("corpus", "compile_cache"):
        shutil.copytree(batch / kind, root / kind)
    return root


def digests(root: Path, kind: str) -> dict[str, str]:
    """Content digests of a root's artifacts of one kind, by their places."""
    manifests = sorted((root / kind).glob("*/*/manifest.json"))
    return {str(path.parent.relative_to(root)): read_manifest(path.parent).content_digest for path in manifests}


def hosts(root: Path) -> set[str]:
    """Hosts of the workers that have written heartbeats."""
    files = root.glob("run/*/heartbeats/rank-*.json")
    return {json.loads(path.read_text(encoding="utf-8"))["host"] for path in files}


def require_same_training(root: Path, other: Path) -> None:
    assert list(checkpoints(root))[-1] == f"step-{LAST_STEP:08d}"
    assert read_run(root).losses == read_run(other).losses
    assert state_hash(list(checkpoints(root).values())[-1]) == state_hash(list(checkpoints(other).values())[-1])


def wait_for_steps(job: Job, root: Path, count: int) -> None:
    """Waits until the run has recorded `count` more steps, including repeated ones."""
    before = len(recorded(root))
    wait_until(lambda: len(recorded(root)) >= before + count or job.has_ended, JOB_SECONDS)
    assert not job.has_ended, job.logs


def recorded(root: Path) -> list[str]:
    return [line for path in root.glob("run/*/metrics.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]


def attempts(root: Path) -> list[dict[str, object]]:
    (path,) = root.glob("run/*/attempts.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_pipeline_on_two_nodes_makes_the_same_corpus_cache_and_weights(inline: Path, batch: Path) -> None:
    assert len(digests(batch, "corpus")) == 1
    assert digests(batch, "corpus") == digests(inline, "corpus")
    # A cache's digest of what it is compiled from is its name; compiled files have their build folders in them.
    assert len(digests(batch, "compile_cache")) == 1
    assert digests(batch, "compile_cache").keys() == digests(inline, "compile_cache").keys()
    assert len(hosts(batch)) == 2
    require_same_training(batch, inline)
    assert not list((batch / "ray-tokens").iterdir())


def test_a_lost_child_and_one_that_is_told_to_leave_end_in_retries_with_the_same_weights(
    batch: Path, untrained: Path, recipe: Path, submit: Submit
) -> None:
    job = submit(define("trainer", recipe, untrained))
    wait_for_steps(job, untrained, 30)
    job.wait_for_attempt(1).lose_host(1)
    told = job.wait_for_attempt(2)
    wait_for_steps(job, untrained, 10)
    told.nodes[1].send(signal.SIGTERM)

    assert job.wait(JOB_SECONDS) == "SUCCEEDED", job.logs
    assert job.exit_codes == [75, 75, 0], job.logs
    assert "the job lost node 1" in job.attempts[0].logs
    assert [each["ended_by"] for each in attempts(untrained)][-2:] == ["preemption", "completion"]
    require_same_training(untrained, batch)


def test_a_job_that_is_terminated_commits_a_checkpoint_and_goes_on_when_submitted_again(
    batch: Path, untrained: Path, recipe: Path, submit: Submit
) -> None:
    job = submit(define("trainer", recipe, untrained))
    wait_for_steps(job, untrained, 30)
    job.terminate()

    assert job.wait(JOB_SECONDS) == "FAILED", job.logs
    assert job.exit_codes == [75], job.logs
    (stopped,) = attempts(untrained)
    assert list(checkpoints(untrained))[-1] == f"step-{stopped['last_step']:08d}"
    assert submit(define("trainer", recipe, untrained)).wait(JOB_SECONDS) == "SUCCEEDED"
    require_same_training(untrained, batch)
