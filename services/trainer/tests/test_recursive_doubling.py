"""Agreement among nodes in virtual time: all get one result, after log2(nodes) messages in a row."""

from __future__ import annotations

import math
import random

import pytest

from services.common.testing.seeds import draw_seed
from services.trainer.agreement.recursive_doubling import Message, RecursiveDoubling, partners_of
from services.trainer.tests.virtual_network import HOP_SECONDS, reduce_in_virtual_time


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 31, 33])
def test_all_nodes_get_the_values_of_all_in_the_order_of_nodes_however_messages_overtake(num_nodes: int) -> None:
    delays = random.Random(draw_seed())
    values: list[list[object]] = [[{node: step} for node in range(num_nodes)] for step in range(4)]

    results, _, _ = reduce_in_virtual_time(num_nodes, lambda a, b: {**a, **b}, values, delays.random)

    for of_node in results:
        assert of_node == [dict.fromkeys(range(num_nodes), step) for step in range(4)]
    sums, _, _ = reduce_in_virtual_time(num_nodes, lambda a, b: (a, b), values, delays.random)
    assert all(of_node == sums[0] for of_node in sums), "not in one order"


@pytest.mark.parametrize("num_nodes", [64, 1000, 1023, 1024])
def test_a_thousand_agents_agree_within_a_millisecond(num_nodes: int) -> None:
    values: list[list[object]] = [list(range(num_nodes))]

    results, seconds, sent = reduce_in_virtual_time(num_nodes, max, values, lambda: HOP_SECONDS)

    assert {of_node[0] for of_node in results} == {num_nodes - 1}
    assert seconds < 1e-3
    rounds = math.log2(num_nodes)
    assert round(seconds / HOP_SECONDS) <= rounds + 2
    assert max(sent.values()) <= rounds + 1
    assert max(len(partners_of(node, num_nodes)) for node in range(num_nodes)) <= rounds + 1


def test_partners_are_mutual() -> None:
    for num_nodes in range(1, 40):
        pairs = {(node, other) for node in range(num_nodes) for other in partners_of(node, num_nodes)}
        assert pairs == {(other, node) for node, other in pairs}


@pytest.mark.parametrize(
    "message",
    [
        Message(1, 2, 0, 1, 0.0),
        Message(1, 1, 0, 9, 0.0),
        Message(3, 1, 0, 1, 0.0),
        Message(0, 1, 0, 1, 0.0),
    ],
    ids=["from no partner of the round", "of no round", "of a later reduction", "of an earlier reduction"],
)
def test_a_message_that_is_not_due_is_refused(message: Message[float]) -> None:
    node = RecursiveDoubling[float](0, 4, max)
    node.begin(1.0)
    with pytest.raises(ValueError, match=f"reduction {message.sequence}"):
        node.receive(message)


def test_a_message_that_comes_twice_is_refused() -> None:
    node = RecursiveDoubling[float](0, 4, max)
    node.begin(1.0)
    node.receive(Message(1, 1, 0, 1, 2.0))
    with pytest.raises(ValueError, match="round 1"):
        node.receive(Message(1, 1, 0, 1, 2.0))
