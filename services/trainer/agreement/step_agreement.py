"""Lets all workers agree on a step while they compute the next one.

A worker writes its own numbers of a step on its node's board. On a single node every worker reads those of all. On
several nodes a thread of each node's leader, which is its first worker, reduces them, exchanges the result with
log2(nodes) other leaders, and writes what all nodes agree on to the board. So a worker that is no leader sends nothing,
and a leader sends a fixed number of bytes to each partner.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from services.common.errors import WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.launch.node_board import NodeBoard
from services.common.process.stopwatch import Stopwatch
from services.common.program.process_group import ProcessGroup
from services.trainer.agreement.leader_links import LeaderLinks
from services.trainer.agreement.recursive_doubling import RecursiveDoubling
from services.trainer.agreement.step_reduction import ReducedStep, WorkerStep, join_encoded

T = TypeVar("T")

LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 2e-5, 1e-3
"""Seconds between two looks at the board: they double with each look."""
MESSAGE_WAIT_SECONDS = 0.1
"""Seconds after which a leader that waits for a message sees that its run has ended."""


class StepAgreement:
    """One worker's part in the agreement on steps. All workers begin and finish the same agreements, in turns."""

    def __init__(self, environment: WorkerEnvironment, group: ProcessGroup, board: NodeBoard | None) -> None:
        self._environment, self._group, self._board = environment, group, board
        # The workers of a node may form several groups, one after the other, on one board.
        self._sequence = zlib.crc32(environment.rendezvous.encode()) << 32
        self._own: WorkerStep | None = None
        self._of_workers: list[WorkerStep] = []
        self._leader: _Leader | None = None
        if board and environment.num_nodes > 1 and environment.local_rank == 0:
            self._leader = _Leader(environment, group, board, self._sequence)

    @property
    def node_stop_reason(self) -> int:
        """The strongest stop reason that the node's agent has heard; 0 for none."""
        return self._board.stop_reason if self._board else 0

    def begin(self, step: WorkerStep) -> None:
        """Give this worker's part of the next agreement. Returns at once."""
        assert self._own is None, "the agreement before is not finished"
        self._sequence, self._own = self._sequence + 1, step
        self._of_workers = []
        if self._board:
            self._board.write_numbers(self._environment.local_rank, self._sequence, step.encode())
        if self._leader:
            self._leader.begin()

    def finish(self) -> ReducedStep:
        """Return what all workers agree on, once all of them have begun this agreement.

        Raises `WorkersLost` if another node is lost, or if the agreement takes longer than a collective may.
        """
        assert self._own is not None, "no agreement has begun"
        look = self._look_at_node if self._environment.num_nodes == 1 else self._look_at_board
        reduced = _wait_for(look, self._check, self._group.timeout.total_seconds())
        self._own = None
        return reduced

    def close(self) -> None:
        if self._leader:
            self._leader.close()
        if self._board:
            self._board.close()

    def _look_at_node(self) -> ReducedStep | None:
        assert self._own is not None
        if not self._board:
            return ReducedStep.of_worker(self._environment.rank, self._own)
        of_workers = _all_on_board(self._board, self._sequence, self._of_workers)
        return ReducedStep.of_node(0, of_workers) if of_workers else None

    def _look_at_board(self) -> ReducedStep | None:
        assert self._board
        encoded = self._board.node_numbers(self._sequence)
        return ReducedStep.decode(encoded) if encoded else None

    def _check(self, is_late: bool) -> None:
        if self._leader and self._leader.error:
            raise self._leader.error
        if is_late:
            where = "this node" if self._environment.num_nodes == 1 else "all nodes"
            raise WorkersLost(
                f"the workers of {where} did not agree on a step within {self._group.timeout.total_seconds():.0f} s: "
                f"one of them has ended or hangs"
            )


@contextmanager
def agreeing(environment: WorkerEnvironment, group: ProcessGroup) -> Iterator[StepAgreement]:
    """Take part in the agreement of all workers for the block. All workers enter together."""
    folder = environment.node_folder
    assert environment.world_size == 1 or folder, "workers that form a group have a folder on their node"
    agreement = StepAgreement(environment, group, NodeBoard.open(folder) if folder else None)
    try:
        yield agreement
    finally:
        agreement.close()


class _Leader:
    """The thread that agrees with the leaders of other nodes on behalf of its own node."""

    def __init__(
        self, environment: WorkerEnvironment, group: ProcessGroup, board: NodeBoard, last_sequence: int
    ) -> None:
        self.error: Exception | None = None
        """The error with which the thread ended; None where there was none."""
        self._rank, self._board, self._sequence = environment.rank, board, last_sequence
        node, num_nodes = environment.node_rank, environment.num_nodes
        assert group.store
        place = (node, num_nodes, environment.rendezvous)
        self._links = LeaderLinks.connect(*place, group.store, group.timeout, environment.key)
        self._doubling = RecursiveDoubling(node, num_nodes, join_encoded, last_sequence + 1)
        self._has_ended = False
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._begun.put(None)

    def close(self) -> None:
        self._has_ended = True
        self._begun.put(None)
        self._thread.join(2 * MESSAGE_WAIT_SECONDS)
        self._links.close()

    def _run(self) -> None:
        try:
            while not self._has_ended:
                self._begun.get()
                self._agree()
        except _RunEnded:
            pass
        except Exception as error:  # noqa: BLE001 - the worker raises it when it waits for the agreement
            self.error = error

    def _agree(self) -> None:
        self._sequence += 1
        found: list[WorkerStep] = []
        of_workers = _wait_for(lambda: _all_on_board(self._board, self._sequence, found), self._check)
        self._links.send(self._doubling.begin(ReducedStep.of_node(self._rank, of_workers).encode()))
        while (awaited := self._doubling.awaited) is not None:
            self._check()
            if awaited in self._links.lost:
                raise self._links.lost[awaited]
            for message in self._links.receive(MESSAGE_WAIT_SECONDS):
                self._links.send(self._doubling.receive(message))
        assert self._doubling.result is not None
        self._board.write_node_numbers(self._sequence, self._doubling.result)

    def _check(self, is_late: bool = False) -> None:
        if self._has_ended:
            raise _RunEnded


class _RunEnded(Exception):
    """Ends a leader's thread whose worker has no more agreements."""


def _all_on_board(board: NodeBoard, sequence: int, found: list[WorkerStep]) -> list[WorkerStep] | None:
    """Add the steps that workers of the node have written to `found`; return it once it has those of all workers."""
    while len(found) < board.num_workers:
        numbers = board.numbers(len(found), sequence)
        if numbers is None:
            return None
        found.append(WorkerStep.decode(numbers))
    return found


def _wait_for(look: Callable[[], T | None], check: Callable[[bool], None], seconds: float = float("inf")) -> T:
    """Look until there is a value, which is mostly there at once, and return it.

    `check` is called between two looks with whether more than `seconds` have passed, and ends the wait by an error.
    Only seconds in which this process runs count: after a pause of the whole run, as by Ctrl-Z, nobody is late.
    """
    waited, pause_seconds = Stopwatch(), LEAST_PAUSE_SECONDS
    while (found := look()) is None:
        check(waited.look(True) > seconds)
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, MOST_PAUSE_SECONDS)
    return found
