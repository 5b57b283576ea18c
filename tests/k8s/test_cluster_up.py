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
from tests.k8s.rendered import Thing, cluster_of

HEAD = "millrace/head@sha256:" + "1" * 64
NEXT_HEAD = "millrace/head@sha256:" + "2" * 64


class Server:
    """Keeps what is applied. Its RayCluster is up; its pods and Jobs are given."""

    namespace, server = "millrace", "here"

    def __init__(self, cluster: Thing, pods: list[Thing], jobs: list[Thing]) -> None:
        self._live, self._pods = cluster, pods
        self._jobs = {job["metadata"]["name"]: job for job in jobs}
        self.applied: list[str] = []

    def within(self, namespace: str) -> Server:
        return self

    def find(self, kind: str, name: str) -> Thing | None:
        return self._live if kind == "RayCluster" else self._jobs.get(name)

    def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
        if "node-type=head" in selector:
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            spec = self._live["spec"]["headGroupSpec"]["template"]["spec"]
            return [{"metadata": {"name": "head"}, "spec": spec, "status": ready}]
        return [pod for pod in self._pods if f"component={pod['metadata']['name']}," in selector]

    def apply(self, body: Thing, is_trial: bool = False) -> Thing:
        if not is_trial:
            self.applied.append(body["kind"])
        return copy.deepcopy(body)


@pytest.fixture
def live(overlays: dict[str, list[Thing]]) -> Thing:
    """The RayCluster as it was applied, with its head's image."""
    cluster = copy.deepcopy(cluster_of(overlays["local"]))
    cluster["metadata"]["resourceVersion"] = "1"
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = HEAD
    return cluster


def running(live: Thing) -> Thing:
    job = render_deploy_job(worker_group_of(live, "trainer"), deployment_of())
    job["metadata"] |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": "now"}
    return job


def change_ray(cluster: Thing) -> None:
    cluster["spec"]["rayVersion"] = "2.61.0"


def change_memory(cluster: Thing) -> None:
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "3Gi"


def change_nothing(cluster: Thing) -> None:
    pass


CHANGES: list[tuple[Callable[[Thing], None], str, str]] = [
    (change_nothing, NEXT_HEAD, f"head image {HEAD} -> {NEXT_HEAD}"),
    (change_ray, HEAD, "rayVersion 2.60.0 -> 2.61.0"),
    (change_memory, HEAD, "the head's pod template"),
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
    left_up: Thing = {"metadata": {"name": "trainer"}}
    for server in (Server(live, [left_up], []), Server(live, [], [running(live)])):
        with pytest.raises(DeviceError, match=re.escape(told)) as raised:
            up(monkeypatch, server, things, tag)
        assert f"HEAD_TAG={HEAD}" in str(raised.value)
        assert server.applied == []
    server = Server(live, [], [])
    assert up(monkeypatch, server, things, tag) == 0
    assert server.applied.count("RayCluster") == 1


def test_the_same_manifests_are_applied_while_a_stage_runs(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch
) -> None:
    live["spec"]["workerGroupSpecs"][2] |= {"replicas": 2}
    server = Server(live, [], [running(live)])
    assert up(monkeypatch, server, overlays["local"], HEAD) == 0
    assert server.applied[-1] == "RayCluster"


def test_an_operator_that_gives_the_head_to_a_batch_scheduler_is_refused(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GivenAway(Server):
        def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
            return [
                each | {"spec": each["spec"] | {"schedulerName": "volcano"}}
                for each in super().find_all(kind, selector, fields)
            ]

    with pytest.raises(DeviceError, match=r"batch scheduler .*volcano"):
        up(monkeypatch, GivenAway(live, [], []), overlays["local"], HEAD)


def test_a_running_group_s_pods_are_not_changed(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(cluster: Thing) -> None:
        cluster["spec"]["workerGroupSpecs"][2]["template"]["spec"]["priorityClassName"] = "urgent"

    live["spec"]["workerGroupSpecs"][2] |= {"replicas": 2}
    server = Server(live, [], [running(live)])
    with pytest.raises(DeviceError, match=r"worker group trainer .*STAGE=trainer"):
        up(monkeypatch, server, with_change(overlays["local"], change), HEAD)
    assert server.applied == []
