"""Workers that freeze or compute wrongly, and runs that diverge: what the run does, and what its record says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.errors import RecipeError, TryAgain, WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.step import Program
from services.trainer.health.heartbeats import (
    find_hang,
    forget_heartbeats,
    heartbeat_seconds,
    read_heartbeats,
    write_heartbeat,
)
from services.trainer.health.straggler import STEPS, Stragglers
from services.trainer.health.watchdog import limit_seconds
from services.trainer.job import Job, rank_log
from services.trainer.metrics.events import read_events
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.report.run_report import write_report
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.supervision.stop import STOP_FILE
from services.trainer.supervision.supervise import supervise
from services.trainer.tests import work
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, read_run

TWO = {"parallel__data_parallel_size": "2"}


@pytest.fixture(scope="module")
def healthy(new_shared_job: NewJob) -> Job:
    """A run to which nothing happens."""
    return train_new(new_shared_job, "healthy")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the workers as the command does."""

    def run(function: Callable[[Job, WorkerEnvironment], None], job: Job) -> None:
        monkeypatch.setattr(
            "services.trainer.supervision.supervise.train_on_node", partial(work.train_on_node_by, function)
        )
        supervise(job)

    return run


def test_a_frozen_worker_ends_in_stacks_and_75_and_the_same_command_continues(
    new_job: NewJob, command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO, train__watchdog_min_seconds="4", train__max_restarts="0")
    with pytest.raises(WorkersLost, match=r"rank 0: step 7 (?s:.*)heartbeat.*rank 1") as raised:
        command(work.train_with_a_worker_that_freezes, job)

    assert raised.value.exit_code == 75
    assert list(checkpoints(job.root)) == ["step-00000005"]
    frozen = read_heartbeats(job)[1]
    assert (frozen["rank"], psutil.pid_exists(frozen["pid"])) == (1, False)
    stacks = rank_log(job.run_folder, 0).read_text(encoding="utf-8")
    assert "train_step" in stacks
    [event] = read_events(job.run_folder)
    assert (event["event"], event["rank"], event["silent_ranks"], event["step"]) == ("watchdog", 0, [1], 7)

    command(work.train_with_a_worker_that_freezes, job)
    assert read_run(job.root).starts[-1].endswith("step-00000005")
    assert work.final_state(job) == work.final_state(healthy)
    assert "1 watchdog" in summarize(open_run(job.root, job.run))
    assert read_metrics(job.run_folder)[-1]["straggler_score"] >= 1


def test_a_worker_that_computes_wrongly_once_is_named_and_nothing_of_it_stays(
    new_job: NewJob, command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO)
    command(work.train_with_a_worker_that_errs_once, job)

    found, restart, restarted = read_events(job.run_folder)
    assert (found["event"], found["cause"], found["step"], found["ranks"]) == ("nan", "hardware", 8, [1])
    assert (restart["event"], restart["from_step"], restart["lost_steps"]) == ("restart", 5, 3)
    assert (restarted["event"], restarted["step"]) == ("restarted", 6)
    assert 0 < restarted["seconds"] <= restarted["time"] - restart["time"]
    assert restart["cause"].startswith("rank 1 (")
    assert read_metrics(job.run_folder)[-1]["skipped_steps"] == 0
    assert work.final_state(job) == work.final_state(healthy)


@pytest.mark.parametrize(
    ("steps", "factor", "floor", "limit"),
    [([1, 2, 90], 10, 5, 20), ([1, 2, 90], 10, 60, 60), ([1], 0, 60, None), ([], 10, 60, None)],
)
def test_a_steps_limit_follows_the_median(steps: list[float], factor: float, floor: float, limit: float | None) -> None:
    assert limit_seconds(steps, factor, floor) == limit


def test_the_straggler_is_the_worker_that_the_others_waited_for() -> None:
    stragglers = Stragglers()

    assert [stragglers.add(0.25) for _ in range(2 * STEPS)] == 2 * ([0.0] * (STEPS - 1) + [0.25 * STEPS])
    assert stragglers.compare(2, 40.0, 20.0) == 2
    assert stragglers.metrics == {"slowest_rank": 2, "straggler_score": 2.0}
    assert stragglers.compare(2, 40.0, 20.0) is None  # it was reported before
    assert stragglers.compare(3, 0.4, 0.2) is None  # nobody waited for long
    assert stragglers.metrics == {"slowest_rank": 3, "straggler_score": 2.0}


def test_a_run_that_diverges_ends_with_2_and_keeps_the_checkpoints_from_before(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(checkpoint__interval_steps="2")
    work.poison(monkeypatch, *range(5, 40))
    with pytest.raises(RecipeError, match=r"step 4(?s:.*)optimizer\.learning_rate") as raised:
        train_here(job)

    assert raised.value.exit_code == 2
    assert list(checkpoints(job.root)) == ["step-00000002", "step-00000004"]
    assert [each["skipped_steps"] for each in read_metrics(job.run_folder)] == [0] * 5 + [*range(1, 12)]
    assert read_attempts(job.run_folder)[-1]["ended_by"] == "divergence"


def test_weights_that_are_not_finite_are_not_saved(new_job: NewJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job, healthy = new_job(), Program.train_step

    def ruined(program: Program, step: int, *arguments: Any) -> object:
        result = healthy(program, step, *arguments)
        if step == 9:
            program.buckets[0].weights_P[0] = float("inf")
        return result

    monkeypatch.setattr(Program, "train_step", ruined)
    with pytest.raises(RecipeError, match=r"step 10.*step 5"):
        train_here(job)
    assert list(checkpoints(job.root)) == ["step-00000005"]


def test_an_interval_or_a_stop_that_meets_a_skipped_step_commits_all_the_same(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(train__max_steps="7")
    work.poison(monkeypatch, 0, 4)  # the fifth step ends an interval, the next update commits it
    (job.run_folder / STOP_FILE).touch()
    with pytest.raises(TryAgain):
        train_here(job)
    assert list(checkpoints(job.root)) == ["step-00000001"]
    train_here(job)
    assert list(checkpoints(job.root))[-2:] == ["step-00000006", "step-00000007"]


def test_skipped_steps_are_in_the_summary_and_the_report_and_resume_gives_the_same_bits(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.poison(monkeypatch, 3, 4, 8)
    straight, first, second = new_job("straight"), new_job("split", train__max_steps="7"), new_job("split")
    for job in (straight, first, second):
        train_here(job)

    run = open_run(second.root, second.run)
    for page in (summarize(run), write_report(run).read_text(encoding="utf-8")):
        assert "3 of 20 steps" in page
    assert work.final_state(straight) == work.final_state(second)


WORLD = 8


@pytest.fixture(scope="module")
def job(new_shared_job: NewJob) -> Job:
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


def test_a_worker_goes_on_where_it_cannot_write_its_heartbeat(new_job: NewJob) -> None:
    job = train_new(new_job, train__max_steps="1")
    [path] = (job.run_folder / "heartbeats").iterdir()
    assert path.name == "rank-00000.json"

    forget_heartbeats(job.run_folder)
    Path(job.run_folder / "heartbeats").touch()
    train_new(new_job, train__max_steps="2")
