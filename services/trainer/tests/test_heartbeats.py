"""After a loss the command tells from the workers' heartbeats whether a step hung, and which ranks were silent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from services.trainer.health.heartbeats import find_hang, forget_heartbeats, heartbeat_seconds, write_heartbeat
from services.trainer.job import Job
from services.trainer.tests.builders import train_new

WORLD = 8


@pytest.fixture(scope="module")
def job(new_shared_job: Callable[..., Job]) -> Job:
    return new_shared_job(parallel__data_parallel_size=str(WORLD), batch__global_batch_size=str(4 * WORLD))


def live(
    job: Job, limit: float, waited: float, frozen: Collection[int] = (), unheard: Collection[int] = (), start: int = 0
) -> None:
    """Let all ranks wait in step 7; frozen ones stand still from its first second on, and others have no file."""
    forget_heartbeats(job.run_folder)
    for rank in sorted({*range(WORLD)} - set(unheard)):
        # Ranks start one after the other, and each has written its newest heartbeat at another moment.
        age = rank / WORLD * heartbeat_seconds(limit)
        seconds = 0.1 if rank in frozen else waited - age
        fields = {"rank": rank, "host": "node", "pid": 7, "attempt": job.attempt, "start": start}
        fields |= {"phase": "step", "step": 6, "phase_seconds": seconds, "limit_seconds": limit}
        write_heartbeat(job.run_folder, fields | {"alive_seconds": 1000 + seconds - 0.05 * rank})


@pytest.mark.parametrize(
    ("frozen", "unheard", "silent"),
    [((), (), []), ((0,), (), [0]), ((), (4, 5), [4, 5]), ((1, 7), (4, 5), [1, 4, 5, 7])],
    ids=["none", "the first", "a node that never spoke", "several"],
)
def test_the_silent_workers_of_a_hang_are_named(
    job: Job, frozen: tuple[int, ...], unheard: tuple[int, ...], silent: list[int]
) -> None:
    for limit in (4.0, 120.0):
        live(job, limit, limit, frozen, unheard)
        hang = find_hang(job)

        assert hang
        assert (hang.step, hang.silent_ranks, hang.seconds) == (7, silent, limit)
        assert hang.rank == next(rank for rank in range(WORLD) if rank not in silent)


def test_a_loss_before_the_limit_and_heartbeats_of_an_earlier_start_are_no_hang(job: Job) -> None:
    live(job, 120.0, 60.0, frozen=(3,))
    assert find_hang(job) is None
    live(job, 120.0, 120.0, start=1)
    (job.run_folder / "heartbeats" / "rank-00003.json").write_bytes(b"[]\n\xff")
    assert find_hang(job) is None


def test_a_worker_goes_on_where_it_cannot_write_its_heartbeat(new_job: Callable[..., Job]) -> None:
    job = train_new(new_job, train__max_steps="1")
    [path] = (job.run_folder / "heartbeats").iterdir()
    assert path.name == "rank-00000.json"

    forget_heartbeats(job.run_folder)
    Path(job.run_folder / "heartbeats").touch()
    train_new(new_job, train__max_steps="2")
