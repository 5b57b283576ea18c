"""After a loss the command tells from the heartbeats of all nodes whether a step hung, and which ranks were silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from services.common.launch.node_board import NodeBoard
from services.common.launch.node_heartbeats import NodeHeartbeatFile, node_heartbeat_file
from services.trainer.health.silence import find_hang
from services.trainer.job import Job

NODES, WORKERS = 4, 2
WORLD = NODES * WORKERS
LIMIT = 60.0


@pytest.fixture
def job(new_job: Callable[..., Job]) -> Job:
    return new_job(parallel__data_parallel_size=str(WORLD), batch__global_batch_size=str(4 * WORLD))


def live(
    job: Job, folder: Path, seconds: float, frozen: tuple[int, ...] = (), lost_nodes: tuple[int, ...] = ()
) -> None:
    """Let all ranks wait in step 7 for so many seconds; frozen ranks and lost nodes stand still from its start."""
    for node in range(NODES):
        (place := folder / f"node-{node}").mkdir()
        with closing(NodeBoard.make(place, WORKERS)) as board:
            file = NodeHeartbeatFile(board, node_heartbeat_file(job.run_folder, node))
            for now in range(int(seconds) + 1):
                for local_rank in range(WORKERS):
                    rank = node * WORKERS + local_rank
                    if now == 0 or rank not in frozen:
                        board.write_heartbeat(local_rank, heartbeat(job, rank, now))
                if now == 0 or node not in lost_nodes:
                    file.look(1.0, is_last=now in (0, int(seconds)))


def heartbeat(job: Job, rank: int, seconds: int) -> bytes:
    ours = {"rank": rank, "pid": 7, "attempt": job.attempt, "start": job.start_number, "beats": 100 + seconds}
    return json.dumps({**ours, "phase": "step", "step": 6, "phase_seconds": seconds, "limit_seconds": LIMIT}).encode()


@pytest.mark.parametrize(
    ("frozen", "lost_nodes", "silent"),
    [
        ((), (), []),
        ((1,), (), [1]),
        ((0,), (), [0]),
        ((), (2,), [4, 5]),
        ((1, 7), (2,), [1, 4, 5, 7]),
    ],
    ids=["none", "a worker", "the first", "a node", "several"],
)
def test_the_silent_workers_of_a_hang_are_named(
    job: Job, tmp_path: Path, frozen: tuple[int, ...], lost_nodes: tuple[int, ...], silent: list[int]
) -> None:
    live(job, tmp_path, LIMIT, frozen, lost_nodes)
    hang = find_hang(job)

    assert hang
    assert (hang.step, hang.silent_ranks, hang.seconds) == (7, silent, LIMIT)
    assert hang.rank == next(rank for rank in range(WORLD) if rank not in silent)
    assert all(f"rank {rank} (" in hang.message for rank in silent)


def test_a_loss_before_the_limit_is_no_hang(job: Job, tmp_path: Path) -> None:
    live(job, tmp_path, LIMIT / 2, frozen=(3,))
    assert find_hang(job) is None


def test_heartbeats_of_an_earlier_start_do_not_count(job: Job, tmp_path: Path) -> None:
    live(job, tmp_path, LIMIT)
    (job.run_folder / "heartbeats" / "node-00000.jsonl").write_text("[]\nnothing\n", encoding="utf-8")
    for node in range(1, NODES):
        path = node_heartbeat_file(job.run_folder, node)
        path.write_text(path.read_text(encoding="utf-8").replace(job.attempt, "another"), encoding="utf-8")
    assert find_hang(job) is None
