"""Finds the workers that are silent, by two looks at their heartbeats.

Workers of the own node are compared on the node's board. Other nodes' agents write how long their workers have been
silent, and the file of a node whose agent is silent too stands still. The files are read by few: the node with rank 0
reads those of all nodes, and every other node reads that of the node with rank 0 alone, because one worker speaks for
all. On each node the first worker that is not silent reads, so N nodes read 4 N files, whatever the number of workers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.launch.launcher import WorkerEnvironment
from services.common.launch.node_board import NodeBoard
from services.common.launch.node_heartbeats import (
    LOOK_SECONDS,
    WRITE_SECONDS,
    NodeHeartbeats,
    WorkerHeartbeat,
    read_node_heartbeats,
)
from services.trainer.job import Job

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which a worker counts as silent."""
FILE_SECONDS = WRITE_SECONDS + 2 * LOOK_SECONDS
"""Seconds in which the agent of a node writes the node's file at least once."""
LOOK_AHEAD_SECONDS = FILE_SECONDS + LOOK_SECONDS
"""Seconds before the limit of a step at which the first look is taken, so that the second one is due with the limit."""
READ_SECONDS = 5.0
"""Longest wait for the files of nodes: a file system that hangs must not keep the watchdog from ending its process."""


@dataclass(frozen=True)
class SilentRanks:
    """Ranks without a heartbeat."""

    ranks: list[int]
    described: list[str] = field(default_factory=list)
    """A description of each of the ranks: its host, process and last phase, where they are known."""
    are_files_readable: bool = True
    """Whether the heartbeats of other nodes could be read."""
    speaks: bool = True
    """Whether this worker is the one that records the silence for all."""

    def __str__(self) -> str:
        of_others = "" if self.are_files_readable else " The heartbeats of other nodes cannot be read."
        if self.ranks:
            return f"No heartbeat comes from {'; '.join(self.described)}.{of_others}"
        return of_others.strip() or "All workers have a heartbeat."


class SilenceSearch:
    """Looks at heartbeats for the first time when it is made, and for the second time in `find`."""

    def __init__(self, job: Job, environment: WorkerEnvironment, board: NodeBoard) -> None:
        self._job, self._environment, self._board = job, environment, board
        self._own_before = self._look_at_node()
        self._looked_at = time.monotonic()
        self._files: _FileLook | None = None
        self.go_on()

    def go_on(self) -> None:
        """Begin to look at the files of nodes as soon as this worker is the first of its node that is not silent."""
        if self._files is None and self._environment.num_nodes > 1 and self._is_first_to_speak():
            self._files = _FileLook(self._read_files)

    def find(self, wait: Callable[[float], None]) -> SilentRanks:
        """Look for the second time, once the first look is old enough, and return the silent ranks.

        `wait` is called with seconds to wait, in which this worker has to write its own heartbeats.
        """
        wait(max(0.0, self._looked_at + SILENT_SECONDS - time.monotonic()))
        self.go_on()
        silent = self._silent_on_node()
        ranks = sorted(self._first_rank + local_rank for local_rank in silent)
        described = [self._describe(rank, silent[rank - self._first_rank], socket.gethostname()) for rank in ranks]
        is_first = self._environment.local_rank == self._first_speaker(silent)
        if self._files is None:
            return SilentRanks(ranks, described, speaks=is_first)
        wait(max(0.0, self._files.began_at + FILE_SECONDS - time.monotonic()))
        before, after = self._files.take(), _FileLook(self._read_files).take()
        own = self._environment.node_rank
        if before is None or after is None or before[own].writes == after[own].writes:
            return SilentRanks(ranks, described, are_files_readable=False, speaks=is_first)
        found = dict(zip(ranks, described, strict=True))
        for node in after:
            if node != own:
                found |= self._silent_of(node, before[node], after[node])
        others = [rank for node in after if node < own for rank in self._ranks_of(node)]
        speaks = is_first and all(rank in found for rank in others)
        return SilentRanks(sorted(found), [found[rank] for rank in sorted(found)], speaks=speaks)

    @property
    def _first_rank(self) -> int:
        return self._environment.rank - self._environment.local_rank

    def _look_at_node(self) -> list[bytes]:
        return [self._board.heartbeat(local_rank) for local_rank in range(self._board.num_workers)]

    def _silent_on_node(self) -> dict[int, WorkerHeartbeat]:
        """Return the last heartbeats of the own node's silent workers, by local rank."""
        pairs = zip(self._own_before, self._look_at_node(), strict=True)
        return {
            local_rank: WorkerHeartbeat(now)
            for local_rank, (before, now) in enumerate(pairs)
            if before == now and local_rank != self._environment.local_rank
        }

    def _is_first_to_speak(self) -> bool:
        if time.monotonic() - self._looked_at < SILENT_SECONDS:
            return self._environment.local_rank == 0
        return self._environment.local_rank == self._first_speaker(self._silent_on_node())

    def _first_speaker(self, silent: dict[int, WorkerHeartbeat]) -> int:
        return min(set(range(self._board.num_workers)) - silent.keys())

    def _read_files(self) -> dict[int, NodeHeartbeats]:
        own = self._environment.node_rank
        nodes = range(self._environment.num_nodes) if own == 0 else (0, own)
        return {node: read_node_heartbeats(self._job.run_folder, node) for node in nodes}

    def _ranks_of(self, node: int) -> range:
        own = self._environment.node_rank
        size = self._first_rank // own if own else self._environment.local_world_size  # only the last node has fewer
        return range(self._environment.world_size)[node * size : (node + 1) * size]

    def _silent_of(self, node: int, before: NodeHeartbeats, after: NodeHeartbeats) -> dict[int, str]:
        """Return descriptions of the silent workers of another node, by rank."""
        is_node_silent = before.writes == after.writes
        found = {}
        for local_rank, rank in enumerate(self._ranks_of(node)):
            worker = after.workers[local_rank] if local_rank < len(after.workers) else WorkerHeartbeat()
            if is_node_silent or worker.silent_seconds >= SILENT_SECONDS or not self._is_ours(worker.fields):
                found[rank] = self._describe(rank, worker, after.host)
        return found

    def _is_ours(self, fields: dict[str, Any]) -> bool:
        return (fields.get("attempt"), fields.get("start")) == (self._job.attempt, self._job.start_number)

    def _describe(self, rank: int, worker: WorkerHeartbeat, host: str) -> str:
        last = worker.fields
        if not self._is_ours(last):
            return f"rank {rank}"
        return f"rank {rank} ({host}, pid {last['pid']}; last seen in {last['phase']} after step {last['step']})"


class _FileLook:
    """Reads the files of nodes in a thread of its own, which may hang with the file system."""

    def __init__(self, read: Callable[[], dict[int, NodeHeartbeats]]) -> None:
        self.began_at = time.monotonic()
        self._read, self._found = read, dict[int, NodeHeartbeats]()
        self._thread = threading.Thread(target=self._run, name="read-heartbeats", daemon=True)
        self._thread.start()

    def take(self) -> dict[int, NodeHeartbeats] | None:
        """Return the files by node; None where reading them takes longer than READ_SECONDS."""
        self._thread.join(READ_SECONDS)
        return None if self._thread.is_alive() else self._found

    def _run(self) -> None:
        self._found = self._read()
