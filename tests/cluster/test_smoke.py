"""The shortest way through all of it: a real stage on a real cluster makes what its container makes elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.platforms import REPOSITORY
from k8s.client.network_probe import require_network_policies
from k8s.objects.api import Api
from k8s.objects.placement import heads_of, is_ready
from k8s.objects.worker_group import read_cluster
from services.common.testing.waiting import wait_until
from tests.cluster.harness import (
    Harness,
    another_version,
    corpus_digest,
    give_to_stages,
    load_images,
    name_of,
    one,
    running_harness,
)
from tests.cluster.kit import cluster
from tests.containers import run_stage
from tests.small import write_notes, write_small_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def harness(kit: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    load_images("head", "tokenizer")
    with running_harness(kit, tmp_path_factory.mktemp("smoke"), REPOSITORY / "k8s/overlays/local") as made:
        yield made
    assert kit.find("Namespace", "millrace") is None
    assert kit.find("Queue", "millrace") is None


def test_a_dry_run_changes_nothing(harness: Harness) -> None:
    said = harness.succeed("deploy-stage", STAGE="tokenizer", DRY_RUN="1")
    assert "0 -> 1 tokenizer pods; the head and compiler and trainer keep their pods" in said
    assert harness.api.find("Job", "deploy-tokenizer") is None
    assert harness.is_down("tokenizer")


def test_a_stage_on_the_cluster_makes_what_its_container_makes(harness: Harness, tmp_path: Path) -> None:
    write_notes(tmp_path / "fsx/notes")
    give_to_stages(tmp_path / "fsx")
    recipe = write_small_recipe(tmp_path / "small.toml", "/fsx/notes")
    run_stage(name_of("tokenizer"), recipe, tmp_path / "fsx")

    head = harness.head()["metadata"]["uid"]
    harness.succeed("deploy-stage", STAGE="tokenizer")
    assert harness.is_down("tokenizer")
    assert harness.head()["metadata"]["uid"] == head
    assert corpus_digest(harness.root) == corpus_digest(tmp_path / "fsx")
    assert "published" in harness.log_of("tokenizer")
    assert "outcome   exit code 0" in harness.run("stage-status").said


def test_a_subcommand_runs_where_there_is_no_pod(harness: Harness) -> None:
    """The subcommand reads the artifacts of the claim in the stage's image, and writes its file there."""
    deploy(harness)
    corpus = one(harness.root, "corpus/*/[0-9a-f]*/manifest.json").relative_to(harness.root)
    said = harness.succeed("stage-run", STAGE="tokenizer", COMMAND=f"artifacts show {corpus}", MEMORY="1")
    assert corpus_digest(harness.root) in said
    harness.succeed(
        "stage-run",
        STAGE="tokenizer",
        COMMAND="train-vocab /fsx/notes --vocab-size 320 --output 'a vocabulary.model'",
    )
    assert (harness.root / "a vocabulary.model").stat().st_size > 0
    assert one_offs(harness) == []


def test_a_subcommand_s_end_is_the_command_s(harness: Harness) -> None:
    done = harness.run("stage-run", STAGE="tokenizer", COMMAND="artifacts verify /fsx/notes")
    assert (done.code, "/fsx/notes" in done.said) == (3, True), done.said
    done = harness.run("stage-run", STAGE="tokenizer", COMMAND="artefacts verify nowhere")
    assert (done.code, "Do you mean artifacts?" in done.said) == (2, True), done.said
    assert one_offs(harness) == []


def test_ctrl_c_ends_a_subcommand_and_what_nobody_followed_is_found_again(harness: Harness) -> None:
    command = {"STAGE": "tokenizer", "COMMAND": "artifacts list ."}
    process = harness.start("stage-run", **command)
    wait_until(lambda: one_offs(harness), 60)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    wait_until(lambda: not one_offs(harness), 60)
    assert harness.run("stage-run", FOLLOW="0", **command).code == 0
    [name] = one_offs(harness)
    assert name in harness.run("stage-status").said
    done = harness.run("stage-run", **command)
    assert (done.code, f"{name} of " in done.said, "corpus/5" in done.said) == (0, True, True), done.said
    assert one_offs(harness) == []


def one_offs(harness: Harness) -> list[str]:
    found = harness.api.find_all("Job", "millrace.dev/component=one-off")
    return [job["metadata"]["name"] for job in found if "deletionTimestamp" not in job["metadata"]]


def test_an_image_is_swapped_in_and_rolled_back(harness: Harness) -> None:
    """Nobody else's pods notice: the head's UID and the other groups are as they were."""
    deploy(harness)
    first, head = harness.worker_group("tokenizer").image, harness.head()["metadata"]["uid"]
    others = [harness.worker_group(name).spec for name in ("compiler", "trainer")]
    deploy(harness, TAG=another_version("tokenizer"))
    second = harness.worker_group("tokenizer").image
    assert second != first
    assert "@sha256:" in second
    harness.succeed("rollback-stage", STAGE="tokenizer")
    assert harness.worker_group("tokenizer").image == first
    assert harness.head()["metadata"]["uid"] == head
    assert [harness.worker_group(name).spec for name in ("compiler", "trainer")] == others
    assert "cannot go back" in harness.run("rollback-stage", STAGE="tokenizer").said


def test_a_stage_with_a_ray_cluster_of_its_own(harness: Harness) -> None:
    said = deploy(harness, MODE="isolated")
    assert "a Ray cluster of its own starts" in said
    wait_until(lambda: len(harness.api.find_all("RayCluster")) == 1, 120)


def deploy(harness: Harness, **variables: str) -> str:
    said = harness.succeed("deploy-stage", STAGE="tokenizer", **variables)
    assert harness.is_down("tokenizer")
    return said


def test_pods_that_reach_what_policies_forbid_are_found(harness: Harness) -> None:
    """The kit enforces no policies. What a firewall of its node cuts off looks to a pod as an engine's work does."""
    namespace, cluster_ = harness.api.find("Namespace", "millrace"), read_cluster(harness.api)
    assert namespace is not None
    demanding = namespace | {"metadata": namespace["metadata"] | {"annotations": {}}}
    assert "a Job and of the RayCluster" in require_network_policies(harness.api, namespace, cluster_, harness.head())
    rule = ("INPUT", "-s", cluster.POD_RANGE, "-d", cluster.ADDRESS, "-p", "tcp", "--dport", "6443", "-j", "DROP")
    cluster.run("iptables", "-I", *rule)
    try:
        said = require_network_policies(harness.api, demanding, cluster_, harness.head())
    finally:
        cluster.run("iptables", "-D", *rule)
    assert "are enforced" in said


def test_a_drain_takes_the_head_and_ends(harness: Harness) -> None:
    head = harness.head()["metadata"]["uid"]
    drain = ("drain", "node-a", "--pod-selector=ray.io/node-type=head", "--delete-emptydir-data", "--timeout=120s")
    try:
        cluster.kubectl(*drain)
    finally:
        cluster.kubectl("uncordon", "node-a")
    wait_until(lambda: (now := heads_of(harness.api)) and is_ready(now[0]) and now[0]["metadata"]["uid"] != head, 300)


def test_a_stage_that_cannot_run_is_refused_with_the_next_command(harness: Harness) -> None:
    done = harness.run("deploy-stage", STAGE="trainer", TAG=harness.worker_group("tokenizer").image)
    assert done.code == 3
    assert "tokenizer" in done.said or "compile" in done.said
    assert harness.is_down("trainer")
