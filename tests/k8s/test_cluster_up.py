"""`cluster-up` changes nothing under a stage: not its pods, and not the head that they have joined."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.client import overlay
from k8s.client.overlay import cluster_up
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError
from tests.k8s.builders import deployment_of
from tests.k8s.memory_api import MemoryApi
from tests.k8s.rendered import Thing, cluster_of

HEAD = "millrace/head@sha256:" + "1" * 64
NEXT_HEAD = "millrace/head@sha256:" + "2" * 64


class Server(MemoryApi):
    """Keeps what is applied. Its RayCluster is up."""

    def __init__(self, cluster: Thing, *objects: Thing) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        labels = {"ray.io/cluster": "millrace", "ray.io/node-type": "head"}
        spec = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        head = {"kind": "Pod", "metadata": {"name": "head", "labels": labels}, "spec": spec, "status": ready}
        super().__init__(cluster, head, *objects)
        self.applied: list[str] = []

    def within(self, namespace: str) -> Server:
        return self

    def apply(self, body: Thing, is_trial: bool = False) -> Thing:
        if not is_trial:
            self.applied.append(body["kind"])
        return copy.deepcopy(body)


@pytest.fixture
def live(overlays: dict[str, list[Thing]]) -> Thing:
    """The RayCluster as it was applied, with its head's image."""
    cluster = copy.deepcopy(cluster_of(overlays["local"]))
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = HEAD
    return cluster


def running(live: Thing) -> Thing:
    return render_deploy_job(worker_group_of(live, "trainer"), deployment_of())


def change_ray(cluster: Thing) -> None:
    cluster["spec"]["rayVersion"] = "2.61.0"


def change_memory(cluster: Thing) -> None:
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "3Gi"


def change_nothing(cluster: Thing) -> None:
    pass


CHANGES: list[tuple[Callable[[Thing], None], str, str]] = [
    (change_nothing, NEXT_HEAD, f"{HEAD} -> {NEXT_HEAD}"),
    (change_ray, HEAD, "rayVersion"),
    (change_memory, HEAD, "headGroupSpec"),
]


def up(monkeypatch: pytest.MonkeyPatch, server: Server, things: list[Thing], tag: str) -> int:
    monkeypatch.setattr(overlay, "render", lambda folder: things)
    monkeypatch.setattr(overlay, "require_network_policies", lambda *_: "seen on a real cluster")
    return cluster_up(server, Path("any"), tag)  # type: ignore[arg-type]


def with_change(things: list[Thing], change: Callable[[Thing], None]) -> list[Thing]:
    changed = copy.deepcopy(things)
    change(cluster_of(changed))
    return changed


@pytest.mark.parametrize(("change", "tag", "told"), CHANGES)
def test_a_head_is_changed_between_stages_and_not_under_one(
    overlays: dict[str, list[Thing]],
    live: Thing,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Thing], None],
    tag: str,
    told: str,
) -> None:
    """Whether its deployment goes on, or its pods were left up."""
    things = with_change(overlays["local"], change)
    labels = {"millrace.dev/component": "trainer", "ray.io/node-type": "worker"}
    left_up: Thing = {"kind": "Pod", "metadata": {"name": "trainer", "labels": labels}}
    for server in (Server(live, left_up), Server(live, running(live))):
        with pytest.raises(DeviceError, match=re.escape(told)) as raised:
            up(monkeypatch, server, things, tag)
        assert f"HEAD_TAG={HEAD}" in str(raised.value)
        assert server.applied == []
    server = Server(live)
    assert up(monkeypatch, server, things, tag) == 0
    assert server.applied.count("RayCluster") == 1


def test_the_same_manifests_are_applied_while_a_stage_runs(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch
) -> None:
    live["spec"]["workerGroupSpecs"][2] |= {"replicas": 2}
    server = Server(live, running(live))
    assert up(monkeypatch, server, overlays["local"], HEAD) == 0
    assert server.applied[-1] == "RayCluster"
