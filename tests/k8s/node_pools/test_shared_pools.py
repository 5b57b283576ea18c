"""Stages share a node pool: the last one lowers it, and no share is lost between processes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from k8s.client.status import describe_status
from k8s.controller import node_pool
from k8s.controller.node_pool import NodeRelease, open_node_pool
from k8s.objects import eks
from k8s.objects.api import Conflict
from k8s.objects.node_shares import read_share_book
from services.common.errors import DeviceError
from tests.k8s.cloud import POOL, Cloud
from tests.k8s.node_pools.pool import give_back, hold
from tests.k8s.world import World


def test_of_two_stages_the_last_one_lowers_the_group(world: World, cloud: Cloud) -> None:
    """EKS chooses which nodes end, and would end those of the stage that stays."""
    hold(world, "tokenizer", 1)
    hold(world, "compiler", 2)
    assert cloud.size == 3
    give_back(world, "compiler")
    assert (cloud.size, world.held) == (3, {"tokenizer": 1})
    hold(world, "compiler", 2)
    assert cloud.size == 3, "its nodes are still there"
    give_back(world, "tokenizer")
    give_back(world, "compiler")
    assert (cloud.size, world.held) == (0, {})


def test_a_stage_that_the_group_has_no_room_for_waits(world: World, cloud: Cloud) -> None:
    hold(world, "tokenizer", 3)
    pool = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]
    for _ in range(4):
        pool.hold(2)
    assert re.search(rf"{POOL} .* 5 nodes.* 4; tokenizer holds 3", pool.look(2).report)
    assert open_node_pool(world.api, "tokenizer", POOL).look(3).is_raised, "its retry does not wait for the other"  # type: ignore[arg-type]
    give_back(world, "tokenizer")
    hold(world, "compiler", 2)
    assert (world.held, cloud.size) == ({"compiler": 2}, 2)


def test_a_stage_that_comes_while_another_leaves_has_its_nodes(make_world: Callable[[], World], cloud: Cloud) -> None:
    """The two stages take their steps in every possible order."""
    for released in itertools.combinations(range(7), 3):
        world = make_world()
        hold(world, "tokenizer", 2)
        pool = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]
        release = NodeRelease(world.api, "tokenizer")  # type: ignore[arg-type]
        for step in range(7):
            if step in released:
                release.advance()
            elif not pool.look(2).is_raised:
                pool.hold(2)
        give_back(world, "tokenizer")
        while not pool.look(2).is_raised:
            pool.hold(2)
        assert (world.held, cloud.size >= 2) == ({"compiler": 2}, True), released
        give_back(world, "compiler")
        assert cloud.size == 0


def test_a_stage_that_comes_at_the_moment_of_the_lowering_raises_again(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage comes after the other one has read the shares and before it calls EKS."""
    hold(world, "tokenizer", 2)
    resize, compiler = eks.resize_node_group, open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]

    def slow(name: str, desired: int) -> None:
        monkeypatch.setattr(node_pool, "resize_node_group", resize)
        compiler.hold(2)
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", slow)
    give_back(world, "tokenizer")
    assert cloud.size == 0
    assert not compiler.look(2).is_raised
    compiler.hold(2)
    assert compiler.look(2).is_raised
    assert cloud.size == 2


def test_two_stages_that_write_at_once_lose_no_share(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_share_book
    late = open_node_pool(world.api, "compiler", POOL)  # type: ignore[arg-type]

    def interrupted(api: Any) -> Any:
        book = read(api)
        monkeypatch.setattr(node_pool, "read_share_book", read)
        hold(world, "tokenizer", 1)
        return book

    monkeypatch.setattr(node_pool, "read_share_book", interrupted)
    with pytest.raises(Conflict):
        late.hold(2)
    assert world.held == {"tokenizer": 1}
    hold(world, "compiler", 2)
    assert world.held == {"tokenizer": 1, "compiler": 2}


def test_a_process_that_slept_before_it_raised_the_group_lowers_it_again(
    world: World, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one took the stage down in between, and nobody else would know of the nodes."""
    pool, resize = open_node_pool(world.api, "trainer", POOL), eks.resize_node_group  # type: ignore[arg-type]
    pool.hold(2)

    def asleep(name: str, desired: int) -> None:
        monkeypatch.setattr(node_pool, "resize_node_group", resize)
        give_back(world, "trainer")
        resize(name, desired)

    monkeypatch.setattr(node_pool, "resize_node_group", asleep)
    pool.hold(2)
    assert (cloud.size, world.held) == (0, {})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"millrace/trainium": 3}', '{"a/b": {"size_before": 0, "nodes": {"x": "1"}}}']
)
def test_damaged_shares_are_an_error(world: World, cloud: Cloud, text: str) -> None:
    hold(world, "trainer", 2)
    world.api.merge("Lease", "node-pools", {"metadata": {"annotations": {"millrace.dev/node-pools": text}}})
    with pytest.raises(DeviceError, match=r"millrace.dev/node-pools.* delete lease node-pools"):
        describe_status(world.api)  # type: ignore[arg-type]
