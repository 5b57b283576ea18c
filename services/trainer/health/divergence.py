"""Ends a run that diverges, and finds the worker whose hardware made a gradient that is not finite.

A gradient that is not finite is computed again, as in Megatron's rerun state machine. If the second result is finite,
the cause is not the data but a worker with inconsistent results.
"""

from __future__ import annotations

import socket

from services.common.errors import RecipeError, WorkersLost
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.trainer.agreement import TakenStep
from services.trainer.checkpoints.steps import newest_step
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.metrics.records import StepRecord


class SkippedSteps:
    """Counts the steps whose update was not applied because a gradient was not finite."""

    def __init__(self, job: Job, total: int) -> None:
        self._limit = job.recipe.train.max_consecutive_skipped_steps
        self.total = total
        """Number of skipped steps since the run began."""
        self.in_a_row = 0
        """Number of skipped steps in a row, up to the newest step of this process."""

    def count(self, is_applied: bool) -> None:
        self.total += not is_applied
        self.in_a_row = 0 if is_applied else self.in_a_row + 1

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row > self._limit


def find_faulty_worker(job: Job, program: Program, group: ProcessGroup, taken: TakenStep) -> WorkersLost | None:
    """Compute the gradient of a step again, which was not finite, and record the cause.

    All workers call this. Returns an error if a worker's gradient is finite in only one of the two computations: the
    worker's earlier results may be wrong, too, so all start again from the newest checkpoint. A lazy device computes
    nothing again, because keeping a step's norms would change its graph.
    """
    facts = {"step": taken.record.step, "batch": taken.batch}
    again = program.compute_again(taken.micro_batches)
    if again is None:
        if group.rank == 0:
            record_event(job, "nan", cause="unknown", **facts)
        return None
    workers = group.gather({"host": socket.gethostname(), "first": again.was_finite, "second": again.is_finite})
    faulty = [rank for rank, worker in enumerate(workers) if worker["first"] != worker["second"]]
    ranks = faulty or [rank for rank, worker in enumerate(workers) if not worker["second"]]
    if group.rank == 0:
        hosts = [workers[rank]["host"] for rank in ranks]
        record_event(
            job,
            "nan",
            cause="hardware" if faulty else "data" if ranks else "unknown",
            **facts,
            ranks=ranks,
            hosts=hosts,
        )
    if not faulty:
        return None
    named = ", ".join(f"rank {rank} ({workers[rank]['host']})" for rank in faulty)
    return WorkersLost(
        f"{named}: the gradient of step {taken.record.step} was finite in only one of two computations of the same "
        f"micro-batches. The same command continues; replace the node if it causes this again."
    )


def diverged(job: Job, record: StepRecord, skipped: SkippedSteps) -> RecipeError:
    """Make the error of a run that diverged. Its exit code is 2, because a retry would repeat the divergence."""
    limit, newest = job.recipe.train.max_consecutive_skipped_steps, newest_step(job.checkpoint_collection)
    what = "its weights are no longer finite, so they were not saved"
    if skipped.are_too_many:
        what = (
            f"{skipped.in_a_row} steps in a row were skipped because their gradients were not finite, expected at most "
            f"train.max_consecutive_skipped_steps = {limit}"
        )
    kept = "No checkpoint exists"
    if newest is not None:
        kept = f"The newest checkpoint is of step {newest}; --train.branch.step can go on from an earlier one"
    return RecipeError(
        f"{job.run}: diverged at step {record.step}: {what}. Gradient norm {record.gradient_norm:g}, learning rate "
        f"{record.learning_rate:g}; {skipped.total} of {record.step} steps were skipped. {kept} "
        f"({job.checkpoint_collection}). The same command would diverge again: try a lower optimizer.learning_rate, a "
        f"longer optimizer.warmup_steps or another train.seed."
    )
