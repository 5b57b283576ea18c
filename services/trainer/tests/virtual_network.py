"""Carries the messages of nodes that reduce values together, in virtual time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from services.trainer.agreement.recursive_doubling import Message, RecursiveDoubling

HOP_SECONDS = 50e-6
"""Time of a small message between two nodes of a placement group, assumed."""


def reduce_in_virtual_time(
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
