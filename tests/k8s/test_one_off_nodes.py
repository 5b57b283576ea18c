"""The node of a one-off: it comes while the one-off goes on and goes after it, whoever is killed on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from k8s.controller.one_off_nodes import APPEAR_SECONDS, LEAVE_SECONDS, OneOffNodes
from k8s.controller.reaper import ORPHAN_SECONDS, OneOffReaper
from k8s.objects import eks
from k8s.objects.names import node_pool_annotation
from k8s.objects.one_off_job import cpu_group_of, render_one_off_job, render_one_off_nodes_job
from k8s.objects.worker_group import worker_group_of
from tests.k8s.builders import Clock
from tests.k8s.cloud import POOL, Cloud
from tests.k8s.node_pools.pool import Killed, Mortal
from tests.k8s.one_offs.cluster import one_off_of
from tests.k8s.rendered import Thing
from tests.k8s.world import World, complete_job

ONE_OFF = "one-off-trainer-abc123"


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


def test_a_client_that_died_before_its_job_was_made_holds_nothing(world: World, cloud: Cloud) -> None:
    world.api.delete("Job", ONE_OFF)
    nodes = nodes_of(world)
    assert advance(world, nodes)
    assert cloud.sizes == [0]
    world.clock.now += APPEAR_SECONDS
    assert not advance(world, nodes)
    assert (cloud.sizes, world.held) == ([0], {})


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
