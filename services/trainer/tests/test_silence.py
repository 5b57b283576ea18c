"""Silent workers are found on the own node by its board, and on other nodes by the files that their agents write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.launch.launcher import WorkerEnvironment
from services.common.launch.node_board import NodeBoard
from services.common.launch.node_heartbeats import NodeHeartbeatFile, node_heartbeat_file, read_node_heartbeats
from services.trainer.health.silence import LOOK_AHEAD_SECONDS, SILENT_SECONDS, SilenceSearch, SilentRanks
from services.trainer.job import Job

NODES, WORKERS = 4, 2
WORLD = NODES * WORKERS


class Cluster:
    """Four nodes with two workers each, whose seconds pass when the test says so."""

    def __init__(self, job: Job, folder: Path, stack: ExitStack) -> None:
        self.job, self.now = job, 0
        self.boards: list[NodeBoard] = []
        self._files: list[NodeHeartbeatFile] = []
        for node in range(NODES):
            (place := folder / f"node-{node}").mkdir()
            self.boards.append(stack.enter_context(closing(NodeBoard.make(place, WORKERS))))
            file = node_heartbeat_file(job.run_folder, node)
            self._files.append(NodeHeartbeatFile(self.boards[-1], file))

    def live(self, seconds: int, frozen: tuple[int, ...] = (), lost_nodes: tuple[int, ...] = ()) -> None:
        """All ranks write their heartbeats but the frozen ones, and all agents their files but those of lost nodes."""
        for _ in range(seconds):
            self.now += 1
            for rank in range(WORLD):
                if rank not in frozen and rank // WORKERS not in lost_nodes:
                    self.boards[rank // WORKERS].write_heartbeat(rank % WORKERS, self._heartbeat(rank))
            for node, file in enumerate(self._files):
                if node not in lost_nodes:
                    file.look(1.0)

    def search(self, rank: int) -> SilenceSearch:
        node, local_rank = divmod(rank, WORKERS)
        place = WorkerEnvironment(rank, WORLD, "", local_rank, WORKERS, node, NODES)
        return SilenceSearch(self.job, place, self.boards[node])

    def _heartbeat(self, rank: int) -> bytes:
        ours = {"attempt": self.job.attempt, "start": self.job.start_number}
        return json.dumps({"rank": rank, "pid": 7, "beats": self.now, "phase": "step", "step": 6, **ours}).encode()


class ThreadWithoutTime:
    """Stands for a thread whose work takes no virtual time."""

    def __init__(self, target: Callable[[], None], **options: object) -> None:
        self.start = target

    def join(self, seconds: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def cluster(new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    job = new_job(
        parallel__data_parallel_size=str(WORLD),
        batch__global_batch_size=str(4 * WORLD),
    )
    with ExitStack() as stack:
        found = Cluster(job, tmp_path, stack)
        monkeypatch.setattr("services.trainer.health.silence.time", SimpleNamespace(monotonic=lambda: found.now))
        monkeypatch.setattr("services.trainer.health.silence.threading", SimpleNamespace(Thread=ThreadWithoutTime))
        yield found


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes whose files were read."""
    nodes: list[int] = []

    def read(folder: Path, node: int) -> object:
        nodes.append(node)
        return read_node_heartbeats(folder, node)

    monkeypatch.setattr("services.trainer.health.silence.read_node_heartbeats", read)
    return nodes


def look_twice(
    cluster: Cluster, rank: int, frozen: tuple[int, ...] = (), lost_nodes: tuple[int, ...] = ()
) -> SilentRanks:
    """Search as the watchdog does, from some seconds before a step is late."""
    cluster.live(20)
    cluster.live(20, frozen, lost_nodes)
    search = cluster.search(rank)
    late_at = cluster.now + LOOK_AHEAD_SECONDS
    while cluster.now < late_at:
        cluster.live(1, frozen, lost_nodes)
        search.go_on()
    found = search.find(lambda seconds: cluster.live(math.ceil(seconds), frozen, lost_nodes))
    assert cluster.now - late_at <= SILENT_SECONDS
    return found


@pytest.mark.parametrize(
    ("frozen", "lost_nodes", "silent"),
    [
        ((), (), []),
        ((1,), (), [1]),
        ((5,), (), [5]),
        ((), (2,), [4, 5]),
        ((1, 7), (2,), [1, 4, 5, 7]),
    ],
    ids=["none", "on the own node", "on another node", "a node", "several"],
)
def test_the_first_worker_names_the_silent_workers_of_all_nodes(
    frozen: tuple[int, ...], lost_nodes: tuple[int, ...], silent: list[int], cluster: Cluster, opened: list[int]
) -> None:
    found = look_twice(cluster, 0, frozen, lost_nodes)

    assert (found.ranks, found.speaks, found.are_files_readable) == (silent, True, True)
    assert all(f"rank {rank} (" in str(found) for rank in silent)
    assert sorted(opened) == sorted([*range(NODES)] * 2)


@pytest.mark.parametrize(
    ("rank", "frozen", "lost_nodes", "silent", "speaks"),
    [
        (1, (), (), [], False),
        (1, (0,), (), [0], True),
        (2, (), (), [], False),
        (2, (0,), (), [0], False),
        (2, (3,), (0,), [0, 1, 3], True),
        (3, (2,), (0,), [0, 1, 2], True),
    ],
    ids=["second", "first is silent", "other node", "second speaks for the first node", "first node is lost", "both"],
)
def test_one_worker_speaks_for_all_and_others_read_the_file_of_the_first_node_alone(
    rank: int,
    frozen: tuple[int, ...],
    lost_nodes: tuple[int, ...],
    silent: list[int],
    speaks: bool,
    cluster: Cluster,
    opened: list[int],
) -> None:
    found = look_twice(cluster, rank, frozen, lost_nodes)

    assert (found.ranks, found.speaks) == (silent, speaks)
    assert len(opened) <= (4 if rank >= WORKERS else 2 * NODES)


def test_a_shared_file_system_that_nobody_can_write_leaves_the_own_nodes_silence(cluster: Cluster) -> None:
    node_heartbeat_file(cluster.job.run_folder, 0).parent.touch()

    found = look_twice(cluster, 0, frozen=(1, 7))

    assert (found.ranks, found.are_files_readable, found.speaks) == ([1], False, True)


def test_a_file_of_an_earlier_start_is_that_of_silent_workers(cluster: Cluster) -> None:
    cluster.live(11)
    cluster.job = replace(cluster.job, start_number=cluster.job.start_number + 1)

    assert look_twice(cluster, 0, lost_nodes=(3,)).ranks == [6, 7]
