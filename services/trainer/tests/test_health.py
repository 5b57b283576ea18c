"""Workers that freeze or compute wrongly: what the run does, and what its record says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from services.common.errors import WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.trainer.health.silence import read_heartbeats
from services.trainer.health.straggler import STEPS, Stragglers
from services.trainer.health.watchdog import limit_seconds
from services.trainer.job import Job, rank_log
from services.trainer.loop import train
from services.trainer.metrics.events import EVENTS_FILE, read_events
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.supervision.supervise import supervise
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, read_run, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1)
TWO = {"parallel__data_parallel_size": "2"}


@pytest.fixture(scope="module")
def healthy(new_shared_job: Callable[..., Job]) -> Job:
    """A run to which nothing happens."""
    job = new_shared_job("healthy")
    train(job, ALONE)
    return job


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the workers as the command does."""

    def run(function: Callable[[Job, WorkerEnvironment], None], job: Job) -> None:
        monkeypatch.setattr(
            "services.trainer.supervision.supervise.train_on_node", partial(work.train_on_node_by, function)
        )
        supervise(job)

    return run


def final_state(job: Job) -> str:
    return state_hash(checkpoints(job.root)["step-00000020"])


def test_a_frozen_worker_ends_in_stacks_and_75_and_the_same_command_continues(
    new_job: Callable[..., Job], command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO, train__watchdog_min_seconds="4", train__max_restarts="0")
    with pytest.raises(WorkersLost, match=r"rank 0: step 7 (?s:.*)heartbeat .*rank 1") as raised:
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
    assert final_state(job) == final_state(healthy)
    assert "1 watchdog" in summarize(open_run(job.root, job.run))
    assert read_metrics(job.run_folder).lines[-1]["straggler_score"] >= 1


def test_a_worker_that_computes_wrongly_once_is_named_and_nothing_of_it_stays(
    new_job: Callable[..., Job], command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO)
    command(work.train_with_a_worker_that_errs_once, job)

    found, restart, restarted = read_events(job.run_folder)
    assert (found["event"], found["cause"], found["step"], found["ranks"]) == ("nan", "hardware", 8, [1])
    assert (restart["event"], restart["from_step"], restart["lost_steps"]) == ("restart", 5, 3)
    assert (restarted["event"], restarted["step"]) == ("restarted", 6)
    assert 0 < restarted["seconds"] <= restarted["time"] - restart["time"]
    assert restart["cause"].startswith("rank 1 (")
    assert read_metrics(job.run_folder).lines[-1]["skipped_steps"] == 0
    assert final_state(job) == final_state(healthy)


def test_gradients_that_the_data_make_infinite_are_the_datas(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(train__max_steps="5")
    work.poison(monkeypatch, 3)
    train(job, ALONE)

    [event] = read_events(job.run_folder)
    assert (event["event"], event["cause"], event["step"], event["batch"], event["ranks"]) == ("nan", "data", 4, 3, [0])
    assert "1 nan (data)" in summarize(open_run(job.root, job.run))


def test_damaged_lines_of_the_events_stop_no_summary(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="1")
    train(job, ALONE)
    (job.run_folder / EVENTS_FILE).write_bytes(b'{"kind": 3}\n[]\n\xff\n{"event": "nan"}\n{"event": "res')
    assert "1 nan" in summarize(open_run(job.root, job.run))


def test_a_steps_limit_follows_the_median() -> None:
    assert limit_seconds([1.0, 2.0, 90.0], 10, 5) == 20
    assert limit_seconds([1.0, 2.0, 90.0], 10, 60) == 60
    assert limit_seconds([1.0], 0, 60) is None
    assert limit_seconds([], 10, 60) is None


def test_the_straggler_is_the_worker_that_the_others_waited_for() -> None:
    stragglers = Stragglers()

    assert [stragglers.add(0.25) for _ in range(2 * STEPS)] == 2 * ([0.0] * (STEPS - 1) + [0.25 * STEPS])
    assert stragglers.compare(2, 40.0, 20.0) == 2
    assert stragglers.metrics == {"slowest_rank": 2, "straggler_score": 2.0}
    assert stragglers.compare(2, 40.0, 20.0) is None  # it was reported before
    assert stragglers.compare(3, 0.4, 0.2) is None  # nobody waited for long
    assert stragglers.metrics == {"slowest_rank": 3, "straggler_score": 2.0}
