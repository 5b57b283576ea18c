"""The three stages for real: real images, real gangs, and what a run survives.

One reference is made with plain containers; whatever happens on the cluster has to end with
the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.exit_codes import EXIT_AGAIN
from images.platforms import REPOSITORY
from k8s.objects.api import Api
from services.common.testing.waiting import wait_until
from services.trainer.metrics.events import count_events
from services.trainer.tests.runs import state_hash
from tests.cluster.harness import (
    Harness,
    another_version,
    corpus_digest,
    forget_training,
    give_to_stages,
    kill_group,
    load_images,
    name_of,
    one,
    running_harness,
)
from tests.cluster.kit import cluster, node_images
from tests.containers import inspect_image, run_stage
from tests.small import write_notes, write_small_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

STAGES = ("tokenizer", "compiler", "trainer")
MINUTE = 60.0
STEPS = 2000  # long enough to be disturbed
ARGUMENTS = f"--train.max_steps={STEPS} --train.evaluation_interval_steps=500 --checkpoint.interval_steps=500"


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head", *STAGES)
    with running_harness(kit, tmp_path_factory.mktemp("stages"), REPOSITORY / "k8s/overlays/local") as made:
        yield made


@pytest.fixture(scope="module")
def reference(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Content digests of corpus and weights, from the same images as plain containers."""
    folder = tmp_path_factory.mktemp("reference")
    write_notes(folder / "fsx/notes")
    give_to_stages(folder / "fsx")
    recipe = write_small_recipe(folder / "small.toml", "/fsx/notes")
    for stage in STAGES:
        run_stage(name_of(stage), recipe, folder / "fsx", *ARGUMENTS.split())
    return {"corpus": corpus_digest(folder / "fsx"), "weights": weights_digest(folder / "fsx")}


@pytest.fixture(scope="module")
def prepared(harness: Harness) -> Harness:
    """Corpus and compile cache are published."""
    for stage in STAGES[:2]:
        deploy(harness, stage)
    return harness


@pytest.fixture
def untrained(prepared: Harness) -> Harness:
    forget_training(prepared)
    return prepared


def deploy(harness: Harness, stage: str = "trainer", **variables: str) -> str:
    """Deploy a stage to its good end; what it said."""
    said = harness.succeed("deploy-stage", STAGE=stage, **{"ARGS": ARGUMENTS, **variables})
    assert harness.is_down(stage)
    return said


def train(harness: Harness, **variables: str) -> subprocess.Popen[str]:
    """Begin to train, and return when steps are taken."""
    client = harness.start("deploy-stage", STAGE="trainer", **{"ARGS": ARGUMENTS, **variables})
    wait_until(lambda: len(harness.steps()) > 20 or client.poll() is not None, 4 * MINUTE)
    assert client.poll() is None, client.communicate()[0]
    return client


def ended(client: subprocess.Popen[str]) -> str:
    said, _ = client.communicate(timeout=600)
    assert client.returncode == 0, said
    return said


def weights_digest(root: Path) -> str:
    return state_hash(one(root, f"checkpoint/*/step-{STEPS:08d}/manifest.json"))


def driver_pod(harness: Harness) -> str:
    """The trainer pod that runs the driver."""
    for pod in harness.ready("trainer"):
        name = str(pod["metadata"]["name"])
        told = cluster.kubectl(
            "-n", "millrace", "exec", name, "-c", "trainer", "--", "sh", "-c", "cat /proc/*/cmdline", quiet=True
        )
        if "-m\0services.trainer" in told:
            return name
    raise AssertionError("no pod runs the driver")


def other_pod(harness: Harness) -> str:
    driver = driver_pod(harness)
    return next(str(pod["metadata"]["name"]) for pod in harness.ready("trainer") if pod["metadata"]["name"] != driver)


def test_three_stages_make_what_plain_containers_make(harness: Harness, reference: dict[str, str]) -> None:
    forget_training(harness)
    head = harness.head()["metadata"]["uid"]
    for stage in STAGES:
        said = deploy(harness, stage)
        assert "keep their pods" in said
    assert {"corpus": corpus_digest(harness.root), "weights": weights_digest(harness.root)} == reference
    assert harness.head()["metadata"]["uid"] == head
    assert f"trained to step {STEPS}" in harness.log_of("trainer")
    assert "already published" in deploy(harness, "tokenizer")


VERSIONS = {"tokenizer": "0.2.0", "compiler": "0.3.1", "trainer": "1.0.0"}


def test_releases_of_different_numbers_are_up_side_by_side(untrained: Harness) -> None:
    """The version's tag names an image with that label, and a stage's pods have that image."""
    images = {stage: another_version(stage, version) for stage, version in VERSIONS.items()}
    digests = {stage: node_images.references()[f"docker.io/{image}"] for stage, image in images.items()}
    assert len({*digests.values()}) == len(STAGES)
    labels = {stage: inspect_image(image)["Config"]["Labels"] for stage, image in images.items()}
    assert {stage: each["org.opencontainers.image.version"] for stage, each in labels.items()} == VERSIONS
    try:
        for stage, version in VERSIONS.items():
            variables = {"TAG": f"{version}-cpu", "KEEP": "1", "ARGS": "--train.max_steps=15"}
            untrained.succeed("deploy-stage", STAGE=stage, **variables)
        for stage, digest in digests.items():
            assert untrained.worker_group(stage).image.endswith(f"@{digest}")
            pods = untrained.ready(stage)
            assert {pod["spec"]["containers"][0]["image"].rpartition("@")[2] for pod in pods} == {digest}
    finally:
        for stage in STAGES:
            untrained.stop(stage)


def test_runs_of_a_pipeline_are_listed_compared_and_reported(untrained: Harness, tmp_path: Path) -> None:
    """The pipeline names what was published before, and the pages of runs come from their cluster to this machine."""
    deploy(untrained, ARGS="--train.max_steps=15")
    said = make(untrained, "pipeline", RECIPE=str(untrained.recipe), ARGS="--train.max_steps=20 --train.seed=1")
    for stage, kind in zip(STAGES[:2], ("corpus", "compile_cache"), strict=True):
        artifact = one(untrained.root, f"{kind}/*/[0-9a-f]*/manifest.json").relative_to(untrained.root)
        assert f"pipeline: {stage}: skipped, already published: /fsx/{artifact}\n" in said
    assert "attempt 1: its pods are being placed" in said
    assert "attempt 2" not in said
    first, second = runs = sorted(folder.name for folder in (untrained.root / "run").iterdir() if folder.is_dir())
    assert re.search(rf"pipeline: trainer: published, /fsx/checkpoint/({first}|{second})\n", said)

    listed = make(untrained, "runs")
    for run in runs:
        assert re.search(rf"^{run} +done +(15 of 15|20 of 20) ", listed, re.MULTILINE), listed
    compared = make(untrained, "runs", COMPARE=f"{first},{second}")
    assert re.search(r"^train\.seed +(0 +1|1 +0) *$", compared, re.MULTILINE), compared
    assert f"/fsx/run/{first}/report.html" in make(untrained, "report", RUN=first)
    report = untrained.root / "run" / first / "report.html"
    assert f"{first} - Millrace" in report.read_text(encoding="utf-8")
    assert untrained.api.find_all("Job", "millrace.dev/component=one-off") == []


def make(harness: Harness, target: str, **variables: str) -> str:
    """Call a target of the Makefile for this cluster, which must succeed, and return what it printed."""
    words = ["make", "-s", target, "TARGET=kuberay", *(f"{name}={value}" for name, value in variables.items())]
    environment = os.environ | {"OVERLAY": str(harness.overlay)}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("which", "said"), [(other_pod, ""), (driver_pod, "attempt 1 ended with exit code 75")])
def test_a_pod_is_killed_and_the_weights_are_the_same(
    untrained: Harness, reference: dict[str, str], which: Callable[[Harness], str], said: str
) -> None:
    """Before the first checkpoint: it goes on from the copies in the memory of the pod that is left."""
    client = train(untrained, ARGS=f"{ARGUMENTS} --checkpoint.memory_interval_steps=10")
    cluster.kubectl("-n", "millrace", "delete", "pod", which(untrained), "--grace-period=0", "--force")
    assert said in ended(client)
    assert count_events(one(untrained.root, "run/*/events.jsonl"))["recovered"] == 1
    assert weights_digest(untrained.root) == reference["weights"]


@pytest.mark.parametrize("which", [driver_pod, other_pod])
def test_an_evicted_pod_loses_no_step(
    untrained: Harness, reference: dict[str, str], which: Callable[[Harness], str]
) -> None:
    client = train(untrained)
    evict(which(untrained))
    said = ended(client)
    assert "Stopped by preemption" in said
    assert untrained.steps() == list(range(1, STEPS + 1)), "a step was taken twice, or not at all"
    assert weights_digest(untrained.root) == reference["weights"]


def evict(pod: str) -> None:
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "millrace"},
    }
    path = f"/api/v1/namespaces/millrace/pods/{pod}/eviction"
    cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(eviction))


def test_the_head_is_deleted_and_the_run_ends_well(untrained: Harness, reference: dict[str, str]) -> None:
    client = train(untrained)
    head = untrained.head()["metadata"]
    cluster.kubectl("-n", "millrace", "delete", "pod", head["name"], "--wait=false")
    ended(client)
    assert untrained.head()["metadata"]["uid"] != head["uid"]
    assert weights_digest(untrained.root) == reference["weights"]


def test_client_and_deploy_job_are_killed_while_it_trains(untrained: Harness, reference: dict[str, str]) -> None:
    kill_group(train(untrained))
    again = untrained.start("deploy-stage", STAGE="trainer", ARGS=ARGUMENTS)
    pods = untrained.api.find_all("Pod", "millrace.dev/component=deploy,millrace.dev/stage=trainer")
    cluster.kubectl("-n", "millrace", "delete", "pod", pods[0]["metadata"]["name"], "--grace-period=0", "--force")
    said = ended(again)
    assert "already runs this deployment" in said
    record = untrained.record("trainer")
    assert [attempt.exit_code for attempt in record.attempts] == [0], "it was submitted twice"
    assert untrained.steps() == list(range(1, STEPS + 1))
    assert weights_digest(untrained.root) == reference["weights"]


def test_a_person_s_ctrl_c_leaves_the_stage_and_stop_stage_ends_it(untrained: Harness) -> None:
    client = train(untrained)
    os.killpg(client.pid, signal.SIGINT)
    said, _ = client.communicate(timeout=60)
    assert client.returncode == 130
    assert "make stage-logs STAGE=" in said
    at = len(untrained.steps())
    wait_until(lambda: len(untrained.steps()) > at)
    untrained.stop("trainer")
    require_stopped_with_checkpoint(untrained)


def test_a_limit_ends_a_deployment_with_a_checkpoint(untrained: Harness) -> None:
    """Three minutes, in which some steps are taken; the run would take hours."""
    arguments = f"{ARGUMENTS} --train.max_steps=1000000"
    done = untrained.run("deploy-stage", STAGE="trainer", ARGS=arguments, HOURS="0.05")
    assert done.code == EXIT_AGAIN, done.said
    assert "HOURS" in untrained.record("trainer").stop
    require_stopped_with_checkpoint(untrained)


def require_stopped_with_checkpoint(harness: Harness) -> None:
    taken = harness.steps()
    committed = sorted((harness.root / "checkpoint").glob("*/step-*/manifest.json"))
    assert f"step-{taken[-1]:08d}" == committed[-1].parent.name, "steps after the newest checkpoint are lost"
    assert harness.record("trainer").outcome.exit_code == EXIT_AGAIN  # type: ignore[union-attr]
    assert harness.is_down("trainer")
