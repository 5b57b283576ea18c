"""An evaluation that a stop or a kill ends is made again, and the run goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch

from services.common.errors import TryAgain
from services.common.process.shutdown import StopReason
from services.common.program.step import Program
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.evaluation.records import drop_evaluations_after, lacks_last_evaluation, read_evaluations
from services.trainer.evaluation.validation import Validation
from services.trainer.job import Job
from services.trainer.metrics.records import read_metrics
from services.trainer.supervision.stop import request_stop
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, state_hash

RECIPE = {
    "parallel__data_parallel_size": "1",
    "train__max_steps": "8",
    "train__evaluation_interval_steps": "4",
    "train__evaluation_tokens": "1000000",
}


class Killed(Exception):
    """Stands for the end of a worker's process."""


def evaluations(job: Job) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in read_evaluations(job.run_folder)}


@pytest.fixture(scope="module")
def straight(new_shared_job: NewJob) -> Job:
    job = train_new(new_shared_job, **RECIPE)
    assert list(evaluations(job)) == [0, 4, 8]
    return job


def end_in_evaluation(patch: pytest.MonkeyPatch, number: int, end: Callable[[], None]) -> None:
    """Call `end` in a round of the evaluation with this number, counted from 0 in this process."""
    evaluate, train_step, begun = Program.evaluate, Program.train_step, [0]

    def begin(*arguments: Any) -> Any:
        begun[:] = [begun[0] + (arguments[1] % 4 == 0)]  # each fourth step is followed by an evaluation
        return train_step(*arguments)

    def interrupted(*arguments: Any) -> torch.Tensor:
        if begun[0] == number:
            end()
        return evaluate(*arguments)

    patch.setattr(Program, "train_step", begin)
    patch.setattr(Program, "evaluate", interrupted)


def assert_equal_runs(job: Job, straight: Job) -> None:
    assert evaluations(job) == evaluations(straight)
    assert [each["step"] for each in read_metrics(job.run_folder)] == list(range(1, 9))
    assert state_hash(list(checkpoints(job.root).values())[-1]) == state_hash(
        list(checkpoints(straight.root).values())[-1]
    )


@pytest.mark.parametrize(
    ("number", "is_last_round", "committed", "evaluated"),
    [(1, False, ["step-00000004"], [0]), (1, True, ["step-00000004"], [0, 4]), (0, False, [], [])],
    ids=["first round", "last round", "at the start"],
)
def test_a_stop_ends_an_evaluation_with_a_checkpoint_and_the_next_start_evaluates_it(
    new_job: NewJob, straight: Job, number: int, is_last_round: bool, committed: list[str], evaluated: list[int]
) -> None:
    job, rounds = new_job(**RECIPE, checkpoint__interval_steps="5"), list[str]()
    samples = Validation(job.recipe, job.corpus, job.recipe.train.evaluation_tokens)._samples
    stops_in = -(-len(samples) // job.recipe.batch.micro_batch_size) if is_last_round else 1

    def stop() -> None:
        rounds.append("round")
        if len(rounds) == stops_in:
            request_stop(job.run_folder, StopReason.STOP_FILE)

    with pytest.MonkeyPatch.context() as patch:
        end_in_evaluation(patch, number, stop)
        with pytest.raises(TryAgain):
            train_here(job)
    assert len(rounds) == stops_in
    assert list(checkpoints(job.root)) == committed
    assert list(evaluations(job)) == evaluated

    train_here(job)
    assert_equal_runs(job, straight)


@pytest.mark.parametrize("reason", [StopReason.STOP_FILE, StopReason.SIGTERM])
def test_only_signals_end_the_evaluation_at_a_start_that_begins_after_them(new_job: NewJob, reason: StopReason) -> None:
    job = new_job(**RECIPE)
    request_stop(job.run_folder, reason)
    with pytest.raises(TryAgain):
        train_here(job)
    assert (list(checkpoints(job.root)), list(evaluations(job))) == (
        ([], []) if reason == StopReason.SIGTERM else (["step-00000001"], [0])
    )


def test_a_checkpoint_is_committed_while_its_state_is_evaluated(new_job: NewJob, straight: Job) -> None:
    """The run is killed in its last evaluation; the same command then only evaluates."""
    job = new_job(**RECIPE, checkpoint__interval_steps="8")

    def kill_after_commit() -> None:
        if checkpoints(job.root):
            raise Killed

    def advance_and_wait(writer: CheckpointWriter, written_step: int) -> None:
        advance(writer, written_step)
        begun: list[Future[Any] | None] = [writer._writing, writer._committing]
        wait([each for each in begun if each])  # in the background, for as long as it takes

    advance = CheckpointWriter.advance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "advance", advance_and_wait)
        end_in_evaluation(patch, 2, kill_after_commit)
        with pytest.raises(Killed):
            train_here(job)
    assert list(checkpoints(job.root)) == ["step-00000008"]
    assert list(evaluations(job)) == [0, 4]
    assert lacks_last_evaluation(job, 8)

    train_here(job)
    assert_equal_runs(job, straight)
    assert not lacks_last_evaluation(job, 8)
    drop_evaluations_after(job.run_folder, 4)  # as a rollback does
    assert list(evaluations(job)) == [0, 4]
