"""A cluster with a trainer's image, its image's labels, and requests for one-offs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from deploy.client.one_off_request import OneOffRequest
from deploy.client.requested_recipe import read_requested_recipe
from k8s.client import deployment_watch, kuberay_one_off
from k8s.objects.names import node_pool_annotation
from services.common.process.subcommands import LABEL
from services.common.recipe.schema import Stage
from services.common.testing.recipes import recipe_text
from tests.k8s.one_offs.cluster import IMAGE, POOL, Ask, Cluster
from tests.k8s.rendered import Thing, cluster_of
from tests.polling import Script, script_polls


@pytest.fixture
def trainer(overlays: dict[str, list[Thing]]) -> Thing:
    """The RayCluster of a cluster whose nodes are simply there, with an image that a deployment gave the trainer."""
    cluster = copy.deepcopy(cluster_of(overlays["eks"]))
    cluster["metadata"]["annotations"].pop(node_pool_annotation("tokenizer"))
    cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["containers"][0]["image"] = IMAGE
    return cluster


@pytest.fixture
def api(trainer: Thing) -> Cluster:
    return Cluster(trainer)


@pytest.fixture
def pooled(api: Cluster) -> Cluster:
    annotations = {node_pool_annotation("tokenizer"): POOL}
    api.merge("RayCluster", "millrace", {"metadata": {"annotations": annotations}})
    return api


@pytest.fixture(autouse=True)
def labels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The labels of the image, as its registry returns them."""
    told: dict[str, str] = {LABEL: "summary report export artifacts"}
    monkeypatch.setattr(kuberay_one_off, "find_image_labels", lambda group, image: told)
    return told


@pytest.fixture
def while_waiting(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Changes the cluster by one step at each poll, and fails at a poll without a step left."""
    monkeypatch.setattr(deployment_watch, "POLL_SECONDS", 0.01)
    return script_polls(monkeypatch)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text())

    def request(*words: str, stage: Stage = "trainer", **changes: Any) -> OneOffRequest:
        fields: dict[str, Any] = {"recipe": read_requested_recipe(recipe)}
        return OneOffRequest(stage, words or ("summary",), **fields | changes)

    return request
