"""Nodes of an EKS node group come with a deployment or a one-off and go after it, however it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from k8s.client.kuberay_target import KubeRayTarget
from k8s.client.node_pool_view import print_left_nodes, require_nodes_given_back
from k8s.controller import node_pool, reconciler
from k8s.controller.node_pool import PAUSE_SECONDS, RELEASE_SECONDS, check_pool
from k8s.controller.one_off_nodes import OneOffNodes
from k8s.controller.ray_jobs import DriverState
from k8s.controller.reaper import ORPHAN_SECONDS
from k8s.controller.reconciler import Reconciler
from k8s.objects import node_group
from k8s.objects.names import NODE_POOL, stage_annotation
from k8s.objects.node_group import describe_node_group, take_lease
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.worker_group import read_worker_group, worker_group_of
from services.common.errors import DeviceError
from tests.k8s.builders import Clock, one_off_of, pod
from tests.k8s.cloud import POOL, Cloud, Refusal
from tests.k8s.rendered import Thing
from tests.k8s.world import LOST, NoLog, Reconcile, World, complete_job, ended, reap

ONE_OFF = "one-off-trainer-abc123"
OTHER_SHAPE = {"millrace.dev/pool": "trainium", "millrace.dev/shape": "trn1n.32xlarge"}


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock, account: None) -> Callable[[], World]:
    """Makes worlds without nodes, whose trainer and CPU nodes come from the node group."""
    for stage in ("trainer", "tokenizer"):
        eks_cluster["metadata"]["annotations"][stage_annotation(stage, NODE_POOL)] = POOL
    began = clock.now

    def make() -> World:
        clock.now = began
        return World(eks_cluster, clock, nodes=0, pool=POOL)

    return make


class Killed(BaseException):
    """SIGKILL."""


class Mortal:
    """The API for a process that is killed after its n-th write, of whatever kind."""

    def __init__(self, api: Any, writes: int) -> None:
        self._api, self._left = api, writes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)
        return self.counted(call) if name in ("create", "merge", "apply", "delete") else call

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                raise Killed
            return done

        return write


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [([ended(0)], 0), ([ended(3, "millrace: no corpus")], 3), ([LOST, ended(0)], 0), ([LOST, LOST, LOST, LOST], 75)],
)
def test_nodes_come_for_a_deployment_and_go_after_it(
    world: World,
    cloud: Cloud,
    reconcile: Reconcile,
    monkeypatch: pytest.MonkeyPatch,
    states: list[DriverState],
    exit_code: int,
) -> None:
    bound: list[list[str]] = []
    pods: list[int] = []
    resize = node_group.resize_node_group

    def watched(name: str, desired: int) -> None:
        pods.append(len(world.api.names("Pod")))
        resize(name, desired)

    def attempt(number: int) -> DriverState:
        bound.append(world.bound())
        assert (cloud.size, world.holder) == (2, "trainer")
        return states[number - 1]

    monkeypatch.setattr(node_pool, "resize_node_group", watched)
    world.attempt = attempt
    assert reconcile(retries=3).exit_code == exit_code
    assert bound == [["ip-0", "ip-1"]] * len(states)
    assert cloud.sizes == [0, 2, 0], "once up and once down, whatever happened between"
    assert pods == [0, 0], "a node goes after its pod"
    assert world.is_down
    assert world.api.names("Node") == []


def test_a_group_has_one_holder_and_the_next_one_waits(
    world: World, cloud: Cloud, reconcile: Reconcile, capsys: pytest.CaptureFixture[str]
) -> None:
    take_lease(world.api, POOL, "compiler")
    assert reconcile(start_timeout_seconds=60).exit_code == 75
    assert f"node group {POOL} is held by compiler" in capsys.readouterr().out
    assert (cloud.sizes, world.holder) == ([0], "compiler")
    released_at = world.clock.now + 600

    def release() -> None:
        cloud.serve(world)
        if world.clock.now > released_at:
            world.api.delete("Lease", "node-group-trainium")
            world.watch = lambda: cloud.serve(world)

    world.watch = release
    assert reconcile(id="def456").exit_code == 0
    assert cloud.sizes == [0, 2, 0]


def test_a_deploy_job_that_is_killed_after_any_write_leaves_no_node(
    make_world: Callable[[], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed after every single write to Kubernetes or EKS in turn, and the Job's next pod continues."""
    worlds: list[World] = []
    monkeypatch.setattr(reconciler, "RayJobs", lambda cluster, namespace: worlds[-1])
    monkeypatch.setattr(reconciler, "DriverLog", NoLog)
    monkeypatch.setattr(Reconciler, "_pause", lambda self: worlds[-1].pass_time())
    resize, cloud = node_group.resize_node_group, Cloud()
    for writes in itertools.count(1):
        world = make_world()
        worlds.append(world)
        cloud.sizes = [0]
        world.watch = partial(cloud.serve, world)
        deployment = world.deploy()
        api = Mortal(world.api, writes)
        monkeypatch.setattr(node_pool, "resize_node_group", api.counted(resize))
        try:
            outcome = Reconciler(api, deployment, "first").run()  # type: ignore[arg-type]
        except Killed:
            outcome = Reconciler(world.api, deployment, "second").run()
        else:
            break
        world.pass_time()
        assert outcome, f"killed after write {writes}"
        assert (cloud.sizes, world.holder, world.bound()) == ([0, 2, 0], "", []), f"killed after write {writes}"
    assert writes > 10


def test_kept_pods_keep_their_nodes_until_they_are_stopped(
    world: World,
    cloud: Cloud,
    reconcile: Reconcile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """KEEP=1; then `stop-stage` on a machine that has no AWS account, and the reaper."""
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    reconcile(keep=True)
    complete_job(world)
    reap(world, 3 * ORPHAN_SECONDS)
    assert (world.bound(), world.holder) == (["ip-0", "ip-1"], "trainer")
    with pytest.raises(DeviceError, match=rf"{POOL} by trainer.*make stop-stage STAGE=trainer"):
        require_nodes_given_back(world.api)
    print_left_nodes(world.api)
    assert "--nodegroup-name trainium --scaling-config desiredSize=0" in capsys.readouterr().out
    KubeRayTarget(world.api).stop("trainer")
    assert (cloud.size, world.bound()) == (2, [])
    reap(world, 3 * ORPHAN_SECONDS)
    assert world.is_down
    require_nodes_given_back(world.api)


def test_nodes_without_capacity_are_given_up_and_given_back(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    cloud.has_capacity = False
    cloud.set_health("AsgInstanceLaunchFailures", "We currently do not have sufficient trn1.32xlarge capacity")
    outcome = reconcile(start_timeout_seconds=600)
    assert (outcome.exit_code, "AsgInstanceLaunchFailures" in outcome.message) == (75, True)
    assert (cloud.sizes, world.is_down) == ([0, 2, 0], True)


def test_eks_that_is_busy_is_asked_again_after_a_pause(world: World, cloud: Cloud, reconcile: Reconcile) -> None:
    """EKS makes one update of a group at a time."""
    refusal = Refusal("UpdateNodegroupConfig", 409, "ResourceInUseException", times=3)
    began = world.clock.now

    def attempt(number: int) -> DriverState:
        assert world.clock.now - began > 3 * PAUSE_SECONDS
        return ended(0)

    world.attempt = attempt
    assert reconcile().exit_code == 0
    assert refusal.refused == 3
    assert cloud.sizes == [0, 2, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"status": "UPDATING"}, None),
        ({"status": "DEGRADED", "issues": ["AsgInstanceLaunchFailures: none left"]}, None),
        ({"instance_types": ()}, None),  # its launch template says them
        ({"labels": {"millrace.dev/pool": "trainium"}}, None),
        ({"status": "DELETING"}, "DELETING"),
        ({"status": "CREATE_FAILED", "issues": ["NodeCreationFailure: x"]}, "NodeCreationFailure: x"),
        ({"instance_types": ["trn1.2xlarge"]}, "trn1.2xlarge"),
        ({"instance_types": (), "labels": OTHER_SHAPE}, "trn1n.32xlarge"),
        ({"labels": {}}, "millrace.dev/pool=trainium"),
        ({"taints": [{"key": "other", "value": "true", "effect": "NoSchedule"}]}, "other:NoSchedule"),
        ({"subnets": ["subnet-1", "subnet-2"]}, "subnet-1, subnet-2"),
    ],
)
def test_a_pool_that_does_not_fit_is_named(
    world: World, cloud: Cloud, changes: dict[str, Any], named: str | None
) -> None:
    found = check_pool(read_worker_group(world.api, "trainer"), replace(describe_node_group(POOL), **changes))
    assert bool(found) == (named is not None), found
    assert named is None or named in found


@pytest.mark.parametrize(
    ("refused", "changes", "exit_code"),
    [
        (("UpdateNodegroupConfig", 403, "AccessDeniedException"), {}, 4),
        (("DescribeNodegroup", 403, "AccessDeniedException"), {}, 4),
        (None, {"nodes": 5}, 4),  # the group has at most 4
        (None, {"node_pool": "millrace/trn2"}, 4),  # EKS has no such group
        (None, {"node_pool": "other/trainium"}, 4),
        (None, {"capacity_ends_at": "2026-01-31T12:00:00Z"}, 75),  # its reservation is over
    ],
)
def test_nodes_that_will_never_come_end_a_deployment_at_once(
    world: World,
    cloud: Cloud,
    reconcile: Reconcile,
    refused: tuple[str, int, str] | None,
    changes: dict[str, Any],
    exit_code: int,
) -> None:
    refusal = Refusal(*refused) if refused else None
    began = world.clock.now
    outcome = reconcile(**changes)
    if refusal:
        refusal.end()
    assert outcome.exit_code == exit_code
    assert world.clock.now - began < 60
    assert cloud.sizes == [0]
    assert world.is_down


@pytest.mark.parametrize(
    ("status", "code", "waited_seconds"),
    [(403, "AccessDeniedException", 0.0), (503, "ServerException", RELEASE_SECONDS)],
)
def test_nodes_that_eks_does_not_take_back_are_left_to_the_reaper(
    world: World,
    cloud: Cloud,
    reconcile: Reconcile,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: str,
    waited_seconds: float,
) -> None:
    """The budget's action takes the right from the deploy Job while a stage runs; the reaper keeps it.

    EKS answers a few calls a second for a whole account, so one that is busy is asked once in a pause.
    """
    refusals: list[Refusal] = []

    def attempt(number: int) -> DriverState:
        refusals.append(Refusal("UpdateNodegroupConfig", status, code))
        return ended(0)

    world.attempt = attempt
    began = world.clock.now
    assert reconcile().exit_code == 0
    assert waited_seconds <= world.clock.now - began < waited_seconds + 120
    assert 1 <= refusals[0].refused <= 1 + waited_seconds / PAUSE_SECONDS
    assert (cloud.size, world.holder) == (2, "trainer")
    assert "--nodegroup-name trainium --scaling-config desiredSize=0" in capsys.readouterr().out
    refusals[0].end()
    complete_job(world)
    reap(world, 2 * ORPHAN_SECONDS)
    assert cloud.size == 0
    assert world.is_down


def one_off_nodes(world: World, api: Any = None) -> OneOffNodes:
    """The program that holds the node of a one-off whose two Jobs are there."""
    if world.api.find("Job", ONE_OFF) is None:
        cluster = world.api.find("RayCluster", "millrace") or {}
        cpu_group = cpu_group_of(cluster)
        world.api.create(render_one_off_job(worker_group_of(cluster, "trainer"), cpu_group, one_off_of()))
        world.api.create(render_one_off_nodes_job(cpu_group, one_off_of()))
    return OneOffNodes(api or world.api, ONE_OFF)


def advance(world: World, nodes: OneOffNodes, times: int = 4) -> bool:
    is_left = True
    for _ in range(times):
        is_left = nodes.advance()
        world.pass_time()
    return is_left


@pytest.mark.parametrize("how", ["it has ended", "Ctrl-C deletes it"])
def test_a_node_comes_for_a_one_off_and_goes_when_its_pod_has_ended(world: World, cloud: Cloud, how: str) -> None:
    nodes = one_off_nodes(world)
    advance(world, nodes)
    assert (cloud.sizes, world.holder) == ([0, 1], ONE_OFF)
    world.api.create(pod("pod", component="one-off"))
    world.api.merge("Pod", "pod", {"metadata": {"labels": {"job-name": ONE_OFF}}})
    if how == "it has ended":
        complete_job(world, ONE_OFF)
    else:
        world.api.delete("Job", ONE_OFF)
    assert advance(world, nodes)
    assert cloud.size == 1, "the pod is still on it"
    world.api.merge("Pod", "pod", {"status": {"phase": "Succeeded"}})
    assert not advance(world, nodes)
    assert (cloud.sizes, world.holder) == ([0, 1, 0], "")


def test_a_one_off_whose_node_will_never_come_is_told_why(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Refusal("UpdateNodegroupConfig", 403, "AccessDeniedException")
    assert not advance(world, one_off_nodes(world))
    refusal.end()
    assert "AccessDeniedException" in capsys.readouterr().out
    assert (cloud.size, world.holder) == (0, "")


def test_a_refusal_of_eks_takes_no_node_from_a_pod_that_runs(world: World, cloud: Cloud) -> None:
    nodes = one_off_nodes(world)
    advance(world, nodes)
    world.api.create(pod("pod", "ip-0", "one-off"))
    world.api.merge("Pod", "pod", {"metadata": {"labels": {"job-name": ONE_OFF}}})
    refusal = Refusal("DescribeNodegroup", 400, "ClientException")
    assert advance(world, nodes, 30)
    assert (cloud.size, world.holder) == (1, ONE_OFF)
    refusal.end()
    world.api.merge("Pod", "pod", {"status": {"phase": "Succeeded"}})
    complete_job(world, ONE_OFF)
    assert not advance(world, nodes, 30)
    assert (cloud.size, world.holder) == (0, "")


def test_what_holds_a_one_off_s_node_may_be_killed_after_any_write(
    make_world: Callable[[], World], cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed after every single write in turn; the Job's next pod continues, or the reaper does."""
    resize = node_group.resize_node_group
    for writes in itertools.count(1):
        world = make_world()
        world.watch = partial(cloud.serve, world)
        mortal = Mortal(world.api, writes)
        monkeypatch.setattr(node_pool, "resize_node_group", mortal.counted(resize))
        try:
            nodes = one_off_nodes(world, mortal)
            advance(world, nodes)
            complete_job(world, ONE_OFF)
            advance(world, nodes)
        except Killed:
            monkeypatch.setattr(node_pool, "resize_node_group", resize)
            if writes % 2:
                advance(world, one_off_nodes(world))
                complete_job(world, ONE_OFF)
                assert not advance(world, one_off_nodes(world))
            else:
                complete_job(world, ONE_OFF)
                reap(world, 2 * ORPHAN_SECONDS, ONE_OFF)
            assert (cloud.size, world.holder) == (0, ""), f"killed after {writes} writes"
        else:
            assert writes > 3
            return
