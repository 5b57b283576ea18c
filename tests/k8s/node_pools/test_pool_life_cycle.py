"""Nodes come with a deployment and go after it, however it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from k8s.client.commands import stop_stage
from k8s.client.node_pool_checks import print_left_nodes, require_nodes_given_back
from k8s.controller import node_pool, reconciler
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS
from k8s.controller.reconciler import Reconciler
from k8s.objects import eks
from k8s.objects.record import ask_to_stop
from services.common.errors import DeviceError
from tests.k8s.cloud import POOL, Cloud
from tests.k8s.node_pools.pool import Killed, Mortal
from tests.k8s.rendered import Thing, of_kind
from tests.k8s.world import LOST, RUNNING, NoLog, Reconcile, World, complete_job, ended, orphan, reap


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [([ended(0)], 0), ([ended(3, "millrace: no corpus")], 3), ([LOST, ended(0)], 0), ([LOST, LOST, LOST, LOST], 75)],
)
def test_nodes_come_for_a_deployment_and_go_after_it(
    world: World, cloud: Cloud, reconcile: Reconcile, states: list[DriverState], exit_code: int
) -> None:
    bound: list[list[str]] = []

    def attempt(number: int) -> DriverState:
        bound.append(world.bound())
        assert cloud.size == 2
        return states[number - 1]

    world.attempt = attempt
    assert reconcile(retries=3).exit_code == exit_code
    assert bound == [["ip-0", "ip-1"]] * len(states)
    assert cloud.sizes == [0, 2, 0], "once up and once down, whatever happened between"
    assert world.is_down
    assert world.api.names("Node") == []


def test_the_group_is_lowered_to_what_it_was_and_not_before_the_pods_are_gone(
    world: World, cloud: Cloud, reconcile: Reconcile, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.resize(1)
    pods: list[int] = []
    resize = eks.resize_node_group

    def watched(name: str, desired: int) -> None:
        pods.append(len(world.api.names("Pod")))
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", watched)
    assert reconcile().exit_code == 0
    assert cloud.sizes == [0, 1, 3, 1]
    assert pods == [0, 0]


@pytest.mark.parametrize("how", ["stop-stage", "the Job is deleted"])
def test_who_ends_a_deployment_gives_its_nodes_back(world: World, cloud: Cloud, reconcile: Reconcile, how: str) -> None:
    def end() -> None:
        cloud.serve(world)
        if world.drivers and how != "stop-stage":
            world.api.delete("Job", "deploy-trainer")
        elif world.drivers and not world.record.stop:
            ask_to_stop(world.api, world.record, "ann")  # type: ignore[arg-type]

    world.watch = end
    world.attempt = lambda number: RUNNING
    assert reconcile().exit_code == 75
    assert cloud.sizes == [0, 2, 0]
    assert world.is_down


def test_a_deploy_job_that_is_killed_after_any_write_leaves_no_node(
    make_world: Callable[[], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed after every single write to Kubernetes or EKS in turn, and the Job's next pod continues."""
    worlds: list[World] = []
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: worlds[-1])
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: worlds[-1].pass_time())
    resize, cloud = eks.resize_node_group, Cloud()
    for writes in itertools.count(1):
        world = make_world()
        worlds.append(world)
        cloud.sizes = [0]
        world.watch = lambda world=world: cloud.serve(world)  # type: ignore[misc]
        deployment = world.deploy()
        api = Mortal(world.api, writes)
        monkeypatch.setattr(node_pool, "resize_node_group", api.counted(resize))
        try:
            outcome = Reconciler(api, deployment, "first").run()  # type: ignore[arg-type]
        except Killed:
            outcome = Reconciler(world.api, deployment, "second").run()  # type: ignore[arg-type]
        else:
            break
        world.pass_time()
        assert outcome, f"killed after write {writes}"
        assert (cloud.sizes, world.held, world.bound()) == ([0, 2, 0], {}, []), f"killed after write {writes}"
    assert writes > 15


@pytest.mark.usefixtures("reconcile")
def test_the_nodes_of_a_stage_that_nobody_holds_are_given_back(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan(world)
    world.api.delete("Job", "deploy-trainer")
    reap(world, ORPHAN_SECONDS - 10)
    assert (cloud.size, len(world.bound())) == (2, 2), "somebody may be about to deploy it"
    reap(world, 3 * ORPHAN_SECONDS)
    world.pass_time()
    assert cloud.sizes == [0, 2, 0]
    assert world.is_down
    said = capsys.readouterr().out
    assert "no deploy Job holds 2 pods, 1 RayJobs that run, its PodGroup, 2 nodes of its pool" in said
    assert f"node group {POOL}: 2 -> 0 nodes" in said


def test_kept_pods_keep_their_nodes_until_they_are_stopped(
    overlays: dict[str, list[Thing]],
    world: World,
    cloud: Cloud,
    reconcile: Reconcile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """KEEP=1; then `stop-stage` on a machine that has no AWS account, and a reaper that it starts."""
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    world.api.create(of_kind(overlays["eks"], "CronJob")["reaper"])
    reconcile(keep=True)
    complete_job(world)
    reap(world, 3 * ORPHAN_SECONDS)
    assert (world.bound(), world.held) == (["ip-0", "ip-1"], {"trainer": 2})
    with pytest.raises(DeviceError, match=rf"{POOL} \(trainer holds 2\): make stop-stage STAGE=trainer"):
        require_nodes_given_back(world.api)  # type: ignore[arg-type]
    print_left_nodes(world.api)  # type: ignore[arg-type]
    assert "--nodegroup-name trainium --scaling-config desiredSize=0" in capsys.readouterr().out
    stop_stage(world.api, "trainer")  # type: ignore[arg-type]
    assert f"from node group {POOL} within 5 minutes" in capsys.readouterr().out
    assert cloud.size == 2
    [job] = [name for name in world.api.names("Job") if name.startswith("reaper-")]
    spec = world.api.find("Job", job)["spec"]["template"]["spec"]  # type: ignore[index]
    assert spec["containers"][0]["command"] == ["python", "-m", "k8s.controller.reaper"]
    reap(world, 3 * ORPHAN_SECONDS)
    world.pass_time()
    assert cloud.sizes == [0, 2, 0]
    assert world.is_down
    require_nodes_given_back(world.api)  # type: ignore[arg-type]


def test_after_a_reservation_no_node_is_asked_for(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    outcome = reconcile(capacity_ends_at="2026-01-31T12:00:00Z")
    assert outcome.exit_code == 75
    assert "AWS removes its nodes from 2026-01-31T11:20Z on" in outcome.message
    assert cloud.sizes == [0]
