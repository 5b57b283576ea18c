"""Agreement among nodes in virtual time: all get one result, after log2(nodes) messages in a row."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from services.common.testing.seeds import draw_seed
from services.trainer.agreement.recursive_doubling import Message, RecursiveDoubling, partners_of

HOP_SECONDS = 50e-6


def simulate(
    num_nodes: int, combine: Callable[..., object], values: list[list[object]], hop_seconds: Callable[[], float]
) -> tuple[list[list[object]], float, Counter[int]]:
    """Run one reduction for each list of values, in which each node begins the next one as soon as it has a result.

    Returns each node's results, the seconds until the last one, and the messages that each node sent.
    """
    nodes = [RecursiveDoubling(node, num_nodes, combine) for node in range(num_nodes)]
    results: list[list[object]] = [[] for _ in nodes]
    under_way: list[tuple[float, int, Message[object]]] = []
    sent: Counter[int] = Counter()
    now = 0.0

    def send(messages: list[Message[object]]) -> None:
        for message in messages:
            sent[message.sender] += 1
            heapq.heappush(under_way, (now + hop_seconds(), sum(sent.values()), message))

    def go_on(node: int) -> None:
        while nodes[node].result is not None and len(results[node]) < len(values):
            results[node].append(nodes[node].result)
            if len(results[node]) < len(values):
                send(nodes[node].begin(values[len(results[node])][node]))

    for node, machine in enumerate(nodes):
        send(machine.begin(values[0][node]))
        go_on(node)
    while under_way:
        now, _, message = heapq.heappop(under_way)
        send(nodes[message.receiver].receive(message))
        go_on(message.receiver)
    return results, now, sent


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 31, 33])
def test_all_nodes_get_the_values_of_all_in_the_order_of_nodes_however_messages_overtake(num_nodes: int) -> None:
    delays = random.Random(draw_seed())
    values: list[list[object]] = [[{node: step} for node in range(num_nodes)] for step in range(4)]

    results, _, _ = simulate(num_nodes, lambda a, b: {**a, **b}, values, delays.random)

    for of_node in results:
        assert of_node == [dict.fromkeys(range(num_nodes), step) for step in range(4)]
    sums, _, _ = simulate(num_nodes, lambda a, b: (a, b), values, delays.random)
    assert all(of_node == sums[0] for of_node in sums), "not in one order"


@pytest.mark.parametrize("num_nodes", [64, 1000, 1023, 1024])
def test_a_thousand_agents_agree_within_a_millisecond(num_nodes: int) -> None:
    values: list[list[object]] = [list(range(num_nodes))]

    results, seconds, sent = simulate(num_nodes, max, values, lambda: HOP_SECONDS)

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
