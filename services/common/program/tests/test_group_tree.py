"""Exchanges of all workers take few messages for any number of workers, counted here with threads as workers."""

from __future__ import annotations

import operator
import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from services.common.program.process_group import ProcessGroup, Tree

SIZES = [1, 2, 3, 6, 16, 32, 64, 100]


Links = dict[tuple[int, int], SimpleQueue[tuple[int, bytes]]]
"""Messages on their way, by sender and receiver."""


class CountingGroup(ProcessGroup):
    """One of the workers, which are threads that pass each other pickled values and count them."""

    def __init__(self, rank: int, world_size: int, links: Links) -> None:
        super().__init__(rank, world_size)
        self._links = links
        self.sent_bytes: Counter[int] = Counter()
        """Bytes that this worker sent, by the rank that it sent them to."""
        self.num_received, self.in_a_row = 0, 0
        """`in_a_row` is the largest number of messages of which each one had to wait for the one before."""

    def _send(self, rank: int, value: object) -> None:
        content = pickle.dumps(value)
        self.sent_bytes[rank] += len(content)
        self._links[self.rank, rank].put((self.in_a_row + 1, content))

    def _receive(self, rank: int) -> Any:
        in_a_row, content = self._links[rank, self.rank].get(timeout=20)
        self.num_received, self.in_a_row = self.num_received + 1, max(self.in_a_row, in_a_row)
        return pickle.loads(content)


def run(world_size: int, work: Callable[[CountingGroup], Any]) -> tuple[list[CountingGroup], list[Any]]:
    """Call `work` in a thread for each worker, and return the workers with what it returned, by rank."""
    ranks = range(world_size)
    links = {(sender, receiver): SimpleQueue[tuple[int, bytes]]() for sender in ranks for receiver in ranks}
    groups = [CountingGroup(rank, world_size, links) for rank in ranks]
    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(work, groups))
    return groups, results


def depth(world_size: int) -> int:
    return (world_size - 1).bit_length()


@pytest.mark.parametrize("world_size", SIZES)
def test_workers_reduce_and_gather_in_messages_whose_row_grows_with_the_logarithm(world_size: int) -> None:
    for reduce, expected in (
        (lambda group: group.maximum(group.rank), world_size - 1),
        (lambda group: group.reduce(str(group.rank), operator.add), "".join(map(str, range(world_size)))),
        (lambda group: group.gather({"rank": group.rank}), [{"rank": rank} for rank in range(world_size)]),
    ):
        groups, results = run(world_size, reduce)

        assert results == [expected] * world_size
        assert sum(group.num_received for group in groups) == 2 * (world_size - 1)
        assert max(group.in_a_row for group in groups) <= 2 * depth(world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_only_rank_0_receives_what_it_collects(world_size: int) -> None:
    groups, [collected, *others] = run(world_size, lambda group: group.collect(f"{group.rank:0200}"))

    assert list(map(int, collected)) == list(range(world_size))
    assert others == [[]] * (world_size - 1)
    assert sum(group.num_received for group in groups) == world_size - 1
    assert groups[0].num_received == depth(world_size)
    half = [sum(group.sent_bytes.values()) for group in groups[1::2]]
    assert all(sent < 300 for sent in half)  # their own item


@pytest.mark.parametrize("world_size", SIZES)
def test_each_worker_receives_once_what_rank_0_tells(world_size: int) -> None:
    groups, told = run(world_size, lambda group: group._spread("told" * 100 if group.rank == 0 else None))

    assert told == ["told" * 100] * world_size
    assert [group.num_received for group in groups] == [0] + [1] * (world_size - 1)
    assert max(group.in_a_row for group in groups) <= depth(world_size)


@pytest.mark.parametrize("world_size", SIZES)
def test_each_worker_receives_its_item_and_those_of_the_ranks_below_it(world_size: int) -> None:
    items = [f"{rank:0200}" for rank in range(world_size)]
    groups, results = run(world_size, lambda group: group.tell_each(lambda: ("told" * 100, items)))

    assert results == [("told" * 100, item) for item in items]
    received = Counter[int]()
    for group in groups:
        received += group.sent_bytes
    assert all(received[rank] < 700 for rank in range(1, world_size, 2))  # what all are told, and their own item
    assert received.total() < world_size * (500 + 125 * depth(world_size))


@pytest.mark.parametrize("world_size", [16, 32, 64])
def test_the_bytes_of_a_reduction_do_not_grow_with_the_workers(world_size: int) -> None:
    digests = {(part, "weights", 2**62 + part) for part in range(4)}
    groups, _ = run(world_size, lambda group: group.reduce({sorted(digests)[group.rank % 4]}, operator.or_))

    for group in groups:
        assert all(sent <= 2 * len(pickle.dumps(digests)) for sent in group.sent_bytes.values())


@pytest.mark.parametrize("world_size", [64, 32 * 1_024])
def test_a_worker_has_few_connections_and_a_node_has_one_to_the_nodes_before(world_size: int) -> None:
    workers_per_node = 32
    trees = [Tree.of(rank, world_size) for rank in range(world_size)]

    for rank, (parent, children) in enumerate(trees):
        assert len(children) + (parent is not None) <= depth(world_size)
        assert parent is None or rank in trees[parent].children
        leaves_node = parent is not None and parent // workers_per_node != rank // workers_per_node
        assert leaves_node == (rank > 0 and rank % workers_per_node == 0)
