"""Steps that update nothing: counted, left out of Adam's corrections, and too many in a row end the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import RecipeError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.step import Program
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.report.run_report import write_report
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.supervision.stop import STOP_FILE
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1)

# A rate that ruins the weights with its first update, but leaves them finite.
RUINOUS = {"optimizer__learning_rate": "1e30", "optimizer__min_learning_rate": "1e29"}


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the gradients of some steps be no numbers."""
    return lambda *steps: work.poison(monkeypatch, *steps)


def test_a_run_that_updates_nothing_any_more_ends_with_2(new_job: Callable[..., Job]) -> None:
    job = new_job(**RUINOUS)
    with pytest.raises(RecipeError) as raised:
        train(job, ALONE)

    skipped = [record["skipped_steps"] for record in read_metrics(job.run_folder).lines]
    assert skipped[-1] - skipped[-12] == 11
    assert "optimizer.learning_rate" in str(raised.value)
    assert read_attempts(job.run_folder).lines[-1]["ended_by"] == "divergence"


def test_a_run_that_diverges_keeps_the_checkpoints_from_before(
    new_job: Callable[..., Job], poison: Callable[..., None]
) -> None:
    job = new_job(checkpoint__interval_steps="2")
    poison(*range(5, 40))
    with pytest.raises(RecipeError, match="step 4"):
        train(job, ALONE)
    assert list(checkpoints(job.root)) == ["step-00000002", "step-00000004"]


def test_weights_that_are_not_finite_are_not_saved(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, healthy = new_job(), Program.train_step

    def ruined(program: Program, step: int, *arguments: Any) -> object:
        result = healthy(program, step, *arguments)
        if step == 9:
            program.buckets[0].weights_P[0] = float("inf")
        return result

    monkeypatch.setattr(Program, "train_step", ruined)
    with pytest.raises(RecipeError, match=r"step 10.*step 5"):
        train(job, ALONE)
    assert list(checkpoints(job.root)) == ["step-00000005"]


def test_an_interval_or_a_stop_that_meets_a_skipped_step_commits_all_the_same(
    new_job: Callable[..., Job], poison: Callable[..., None]
) -> None:
    job = new_job(train__max_steps="7")
    poison(0, 4)  # the fifth step ends an interval, the next update commits it
    (job.run_folder / STOP_FILE).touch()
    with pytest.raises(TryAgain):
        train(job, ALONE)
    assert list(checkpoints(job.root)) == ["step-00000001"]
    train(job, ALONE)
    assert list(checkpoints(job.root))[-2:] == ["step-00000006", "step-00000007"]


def test_skipped_steps_are_in_the_summary_and_the_report_and_resume_gives_the_same_bits(
    new_job: Callable[..., Job], poison: Callable[..., None]
) -> None:
    poison(3, 4, 8)
    straight, first, second = new_job("straight"), new_job("split", train__max_steps="7"), new_job("split")
    for job in (straight, first, second):
        train(job, ALONE)

    run = open_run(second.root, second.run)
    for page in (summarize(run), write_report(run).read_text(encoding="utf-8")):
        assert "3 of 20 steps" in page
    final = [state_hash(checkpoints(job.root)["step-00000020"]) for job in (straight, second)]
    assert final[0] == final[1]
