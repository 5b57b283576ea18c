"""`cluster-up` changes nothing under a stage: not its pods, and not the head that they have joined."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.client import overlay
from k8s.client.overlay import cluster_up
from k8s.objects.deploy_job import render_deploy_job
from k8s.objects.names import NODE_POOLS, NODE_POOLS_ANNOTATION
from k8s.objects.names import REGION_ANNOTATION as REGION
from k8s.objects.placement import OPERATOR_SECONDS
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError
from tests.k8s.builders import Clock, deployment_of
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
@pytest.mark.parametrize("is_deployed", [True, False])
def test_a_head_is_not_changed_under_a_stage(
    overlays: dict[str, list[Thing]],
    live: Thing,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Thing], None],
    tag: str,
    told: str,
    is_deployed: bool,
) -> None:
    """Whether its deployment goes on, or its pods were left up."""
    pods = [] if is_deployed else [{"metadata": {"name": "trainer"}}]
    server = Server(live, pods, [running(live)] if is_deployed else [])
    with pytest.raises(DeviceError, match="stage trainer ") as raised:
        up(monkeypatch, server, with_change(overlays["local"], change), tag)
    assert told in str(raised.value)
    assert "make stop-stage STAGE=trainer" in str(raised.value)
    assert f"HEAD_TAG={HEAD}" in str(raised.value)
    assert server.applied == []


@pytest.mark.parametrize(("change", "tag", "told"), CHANGES)
def test_a_head_is_changed_between_stages(
    overlays: dict[str, list[Thing]],
    live: Thing,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Thing], None],
    tag: str,
    told: str,
) -> None:
    server = Server(live, [], [])
    assert up(monkeypatch, server, with_change(overlays["local"], change), tag) == 0
    assert server.applied.count("RayCluster") == 1


def test_the_same_manifests_are_applied_while_a_stage_runs(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch
) -> None:
    live["spec"]["workerGroupSpecs"][2] |= {"replicas": 2}
    server = Server(live, [], [running(live)])
    assert up(monkeypatch, server, overlays["local"], HEAD) == 0
    assert server.applied[-1] == "RayCluster"


@pytest.mark.parametrize("scheduler", ["volcano", "yunikorn", "kai-scheduler"])
def test_an_operator_that_gives_the_head_to_a_batch_scheduler_is_refused(
    overlays: dict[str, list[Thing]], live: Thing, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    class GivenAway(Server):
        def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
            return [
                each | {"spec": each["spec"] | {"schedulerName": scheduler}}
                for each in super().find_all(kind, selector, fields)
            ]

    with pytest.raises(DeviceError, match=f"batch scheduler .*the scheduler {scheduler}"):
        up(monkeypatch, GivenAway(live, [], []), overlays["local"], HEAD)


def test_the_region_does_not_change_under_nodes_that_are_held(
    monkeypatch: pytest.MonkeyPatch, overlays: dict[str, list[Thing]], live: Thing
) -> None:
    """Nobody would find the pool to lower it."""
    things = with_change(
        overlays["local"], lambda cluster: cluster["metadata"]["annotations"].update({REGION: "us-east-2"})
    )
    server = Server(live, [], [shares_of("trainer")])
    with pytest.raises(DeviceError, match=r"REGION .*us-east-2, .*trainer"):
        up(monkeypatch, server, things, HEAD)
    assert server.applied == []
    assert up(monkeypatch, Server(live, [], []), things, HEAD) == 0


def shares_of(stage: str) -> Thing:
    """The Lease that says that a stage holds nodes."""
    book = json.dumps({"millrace/trainium": {"size_before": 0, "nodes": {stage: 2}}})
    return {"kind": "Lease", "metadata": {"name": NODE_POOLS, "annotations": {NODE_POOLS_ANNOTATION: book}}}


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


def test_whether_the_operator_runs_is_asked_once_it_had_time(
    live: Thing, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator makes the head's pod some seconds after the RayCluster."""
    began = clock.now

    class Slow(Server):
        def find_all(self, kind: str, selector: str = "", fields: str = "") -> list[Thing]:
            is_there = clock.now - began > OPERATOR_SECONDS + 20
            return super().find_all(kind, selector, fields) if is_there else []

    def sleep(seconds: float) -> None:
        clock.now += 10

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(overlay, "newest_event", lambda api, cluster: "")
    overlay._await_head(Slow(live, [], []))  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert ["?" in line for line in said] == [False, True]
