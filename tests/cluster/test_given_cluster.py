"""A walk through a given cluster (kind, EKS), which needs nothing of this machine but a kubeconfig.

    KUBECONFIG=... OVERLAY=eks|FOLDER TAG=0.1.0-cpu HEAD_TAG=0.1.0-cpu make test-cluster

Its nodes must be able to get the images. What is in its namespace `millrace` is replaced and taken down.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.platforms import REPOSITORY
from k8s.client.overlay import choose_overlay
from k8s.objects.api import Api
from tests.cluster.harness import Harness
from tests.cluster.kit import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def harness(api: Api) -> Iterator[Harness]:
    if api.server == f"https://{cluster.ADDRESS}:6443":
        pytest.skip("the kit's cluster: the other files say more of it")
    overlay = choose_overlay(os.environ.get("OVERLAY") or "local").resolve()
    made = Harness(api, overlay, Path("/fsx"), REPOSITORY / "recipes/tiny-cpu.toml")
    made.succeed("cluster-up")
    yield made
    made.succeed("cluster-down", FORCE="1")
    assert api.find("Namespace", "millrace") is None


def test_a_stage_is_deployed_and_taken_down(harness: Harness) -> None:
    head = harness.head()["metadata"]["uid"]
    harness.succeed("deploy-stage", STAGE="tokenizer", DRY_RUN="1")
    said = harness.succeed("deploy-stage", STAGE="tokenizer")
    assert "published" in said
    assert harness.is_down("tokenizer")
    assert harness.head()["metadata"]["uid"] == head
    assert "outcome   exit code 0" in harness.run("stage-status").said


def test_what_cannot_run_is_refused(harness: Harness) -> None:
    done = harness.run("deploy-stage", STAGE="trainer", NODES="100000")
    assert done.code == 2 or "maxReplicas" in done.said
    assert harness.is_down("trainer")
