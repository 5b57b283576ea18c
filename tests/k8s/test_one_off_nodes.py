"""The node of a one-off: it comes while the one-off goes on and goes after it, whoever is killed on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from k8s.client.node_pool_checks import require_nodes_given_back
from k8s.controller import one_off_nodes, reaper
from k8s.controller.job import EXIT_START_AGAIN
from k8s.controller.node_pool import open_node_pool
from k8s.controller.one_off_nodes import APPEAR_SECONDS, LEAVE_SECONDS, OneOffNodes
from k8s.controller.reaper import ORPHAN_SECONDS, OneOffReaper
from k8s.objects import eks
from k8s.objects.names import OUTCOME_ANNOTATION, node_pool_annotation
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.worker_group import worker_group_of
from services.common.errors import DeviceError
from tests.k8s.builders import Clock
from tests.k8s.cloud import POOL, Cloud, Refusal
from tests.k8s.node_pools.pool import Killed, Mortal
from tests.k8s.one_offs.cluster import one_off_of
from tests.k8s.rendered import Thing
from tests.k8s.world import World, complete_job

ONE_OFF = "one-off-trainer-abc123"
NODES_JOB = "one-off-nodes-trainer-abc123"


pytestmark = pytest.mark.usefixtures("account")


@pytest.fixture
def make_world(eks_cluster: Thing, clock: Clock) -> Callable[[], World]:
    """A world without nodes, with both Jobs of a one-off."""
    eks_cluster["metadata"]["annotations"][node_pool_annotation("tokenizer")] = POOL
    began = clock.now

    def make() -> World:
        clock.now = began
        world = World(eks_cluster, clock, nodes=0, pool=POOL)
        group, cpu_group = worker_group_of(eks_cluster, "trainer"), cpu_group_of(eks_cluster)
        world.api.create(render_one_off_nodes_job(cpu_group, one_off_of()))
        world.api.create(render_one_off_job(group, cpu_group, one_off_of()))
        return world

    return make


def nodes_of(world: World, api: Any = None) -> OneOffNodes:
    return OneOffNodes(api or world.api, ONE_OFF)  # type: ignore[arg-type]


def advance(world: World, nodes: OneOffNodes | OneOffReaper, times: int = 4) -> bool:
    is_left = True
    for _ in range(times):
        is_left = nodes.advance()
        world.pass_time()
    return is_left


def begin_pod(world: World, phase: str = "Running") -> None:
    metadata = {"name": "pod", "labels": {"job-name": ONE_OFF}}
    world.api.create({"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": phase}})


def test_a_node_comes_for_it_and_goes_when_its_pod_has_ended(world: World, cloud: Cloud) -> None:
    nodes = nodes_of(world)
    advance(world, nodes)
    assert (cloud.sizes, world.held) == ([0, 1], {ONE_OFF: 1})
    begin_pod(world)
    complete_job(world, ONE_OFF)
    advance(world, nodes)
    assert cloud.size == 1, "the pod is still on it"
    world.api.merge("Pod", "pod", {"status": {"phase": "Succeeded"}})
    assert not advance(world, nodes)
    assert (cloud.sizes, world.held) == ([0, 1, 0], {})


def test_ctrl_c_gives_it_back_and_a_pod_that_stays_holds_it_for_a_while_only(world: World, cloud: Cloud) -> None:
    nodes = nodes_of(world)
    advance(world, nodes)
    begin_pod(world)
    world.api.delete("Job", ONE_OFF)
    advance(world, nodes)
    assert cloud.size == 1
    world.clock.now += LEAVE_SECONDS
    assert not advance(world, nodes)
    assert (cloud.size, world.held) == (0, {})


def test_beside_a_stage_it_has_a_node_of_its_own_and_leaves_theirs(world: World, cloud: Cloud) -> None:
    pool = open_node_pool(world.api, "tokenizer", POOL)  # type: ignore[arg-type]
    while not pool.look(2).is_raised:
        pool.hold(2)
    nodes = nodes_of(world)
    advance(world, nodes)
    assert cloud.size == 3
    complete_job(world, ONE_OFF)
    assert not advance(world, nodes)
    assert (cloud.size, world.held) == (3, {"tokenizer": 2}), "EKS would choose which of them ends"


def test_a_client_that_died_before_its_job_was_made_holds_nothing(world: World, cloud: Cloud) -> None:
    world.api.delete("Job", ONE_OFF)
    nodes = nodes_of(world)
    assert advance(world, nodes)
    assert cloud.sizes == [0]
    world.clock.now += APPEAR_SECONDS
    assert not advance(world, nodes)
    assert (cloud.sizes, world.held) == ([0], {})


def test_a_job_whose_time_does_not_run_or_of_another_kind_holds_nothing(world: World, cloud: Cloud) -> None:
    """Nodes would be held for ever by what never ends."""
    world.api.merge("Job", ONE_OFF, {"spec": {"suspend": True}})
    advance(world, nodes_of(world))
    world.api.merge(
        "Job", ONE_OFF, {"spec": {"suspend": False}, "metadata": {"labels": {"millrace.dev/component": "x"}}}
    )
    advance(world, nodes_of(world))
    assert cloud.sizes == [0]


def test_a_refusal_is_written_down_for_the_client(
    world: World, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Refusal("UpdateNodegroupConfig", 403, "AccessDeniedException")
    assert not advance(world, nodes_of(world), times=6)
    refusal.end()
    job = world.api.find("Job", NODES_JOB)
    assert job
    outcome = json.loads(job["metadata"]["annotations"][OUTCOME_ANNOTATION])
    assert outcome["exit_code"] == 4
    assert "eks:UpdateNodegroupConfig on it" in outcome["message"]
    assert (cloud.size, world.held) == (0, {})


def test_what_holds_it_may_be_killed_after_any_write(
    make_world: Callable[[], World], cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed after every single write in turn; the Job's next pod continues, and no node is left."""
    resize = eks.resize_node_group
    for writes in itertools.count(1):
        world = make_world()
        world.watch = partial(cloud.serve, world)
        mortal = Mortal(world.api, writes)
        monkeypatch.setattr("k8s.controller.node_pool.resize_node_group", mortal.counted(resize))
        try:
            nodes = nodes_of(world, mortal)
            advance(world, nodes)
            complete_job(world, ONE_OFF)
            advance(world, nodes)
        except Killed:
            monkeypatch.setattr("k8s.controller.node_pool.resize_node_group", resize)
            nodes = nodes_of(world)
            advance(world, nodes)
            complete_job(world, ONE_OFF)
            assert not advance(world, nodes)
            assert (cloud.size, world.held) == (0, {}), f"killed after {writes} writes"
        else:
            assert writes > 4
            return


def test_the_reaper_gives_back_what_nobody_does(world: World, cloud: Cloud) -> None:
    advance(world, nodes_of(world))
    one_offs = OneOffReaper(world.api)  # type: ignore[arg-type]
    world.clock.now += ORPHAN_SECONDS
    assert not advance(world, one_offs), "while it goes on its node is its own"
    world.api.delete("Job", ONE_OFF)
    assert advance(world, one_offs)
    assert cloud.size == 1, "what holds it may do it by itself"
    world.clock.now += ORPHAN_SECONDS
    assert not advance(world, one_offs)
    assert (cloud.size, world.held) == (0, {})


def test_a_run_of_the_reaper_looks_at_one_offs(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reaper, "connect_patiently", lambda: world.api)
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    advance(world, nodes_of(world))
    world.api.delete("Job", ONE_OFF)
    assert reaper.main() == 0
    assert (cloud.size, world.held) == (0, {})
    assert f"reaper: {ONE_OFF}: its node is given back" in capsys.readouterr().out


class Terminated:
    """An event of a process that is told to leave at its third pass."""

    passes = 0

    def is_set(self) -> bool:
        return self.passes > 2

    def set(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self.passes += 1


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_process_that_is_told_to_leave_goes_on_in_another_pod_or_gives_the_node_back(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The one-off still goes on: where somebody deleted the Job that holds the node, nobody else would give it back."""
    monkeypatch.setattr(one_off_nodes, "connect_patiently", lambda: world.api)
    monkeypatch.setattr("threading.Event", Terminated)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("time.sleep", lambda seconds: world.pass_time())
    if is_deleted:
        world.api.delete("Job", NODES_JOB)
    assert one_off_nodes.main(ONE_OFF) == (0 if is_deleted else EXIT_START_AGAIN)
    assert world.held == ({} if is_deleted else {ONE_OFF: 1})


def test_an_eks_that_does_not_answer_is_asked_again(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_off_nodes, "connect_patiently", lambda: world.api)
    monkeypatch.setattr("threading.Event", Terminated)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    refusal = Refusal("DescribeNodegroup", 503, "ServerException", times=1)
    assert one_off_nodes.main(ONE_OFF) == EXIT_START_AGAIN
    assert refusal.left == 0
    assert "describe node group" in capsys.readouterr().err
    assert world.held == {ONE_OFF: 1}


def test_a_cluster_does_not_go_down_under_it(world: World, cloud: Cloud) -> None:
    advance(world, nodes_of(world))
    with pytest.raises(DeviceError, match=f"{ONE_OFF} holds 1.*kubectl -n millrace delete job {ONE_OFF}"):
        require_nodes_given_back(world.api)  # type: ignore[arg-type]
