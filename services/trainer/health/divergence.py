"""Ends a run that diverges, and finds the worker whose hardware made a gradient that is not finite.

The same steps from the same checkpoint would diverge again, so a diverged run is not retried. A gradient that is not
finite is computed again, as in Megatron's rerun state machine. If the second result is finite, the cause is not the
data but a worker with inconsistent results, and the run does not continue with that worker's numbers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from services.common.errors import RecipeError, WorkersLost
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.trainer.checkpoints.steps import newest_step
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.metrics.records import StepRecord

ENDED_BY = "divergence"


class SkippedSteps:
    """Counts the steps whose update was not applied because a gradient was not finite."""

    def __init__(self, job: Job, total: int) -> None:
        self._limit = job.recipe.train.max_consecutive_skipped_steps
        self.total = total
        """Number of skipped steps since the run began."""
        self.in_a_row = 0
        """Number of skipped steps in a row, up to the newest step of this process; 0 if that step was applied."""

    def count(self, is_applied: bool) -> None:
        self.total += not is_applied
        self.in_a_row = 0 if is_applied else self.in_a_row + 1

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row > self._limit


def find_faulty_worker(
    job: Job, program: Program, group: ProcessGroup, step: int, batch: int, micro_batches: Sequence[MicroBatch]
) -> WorkersLost | None:
    """Compute the gradient of step number `step` (from 1) again, which was not finite, and record the cause.

    All workers call this. It returns an error if the gradient of a worker is finite in only one of the two
    computations: earlier results of that worker may be wrong too, so the group starts again from the newest checkpoint.
    A lazy device computes nothing again, because keeping a step's gradients would change its graph.
    """
    facts = {"step": step, "batch": batch}
    again = program.compute_again(micro_batches)
    if again is None:
        if group.rank == 0:
            record_event(job, "nan", cause="unknown", **facts)
        return None
    workers = group.gather({"host": socket.gethostname(), "first": again.was_finite, "second": again.is_finite})
    faulty = [rank for rank, worker in enumerate(workers) if worker["first"] != worker["second"]]
    ranks = faulty or [rank for rank, worker in enumerate(workers) if not worker["second"]]
    if group.rank == 0:
        hosts = [workers[rank]["host"] for rank in ranks]
        record_event(job, "nan", cause="hardware" if faulty else "data", **facts, ranks=ranks, hosts=hosts)
    if not faulty:
        return None
    named = ", ".join(f"rank {rank} ({workers[rank]['host']})" for rank in faulty)
    return WorkersLost(
        f"{named}: the gradient of step {step} was finite in only one of two computations of the same micro-batches. "
        f"The same command continues; replace the node if it causes this again."
    )


def diverged(job: Job, record: StepRecord, skipped: SkippedSteps) -> RecipeError:
    """Make the error of a run that diverged. Its exit code is 2, because a retry would repeat the divergence."""
    train, newest = job.recipe.train, newest_step(job.checkpoint_collection)
    if skipped.are_too_many:
        what = (
            f"{skipped.in_a_row} steps in a row were skipped because their gradients were not finite; "
            f"train.max_consecutive_skipped_steps is {train.max_consecutive_skipped_steps}"
        )
    else:
        what = "its weights are no longer finite, so they were not saved"
    kept = "no checkpoint exists"
    if newest is not None:
        kept = f"the newest checkpoint is of step {newest}; --train.branch.step can go on from an earlier one"
    return RecipeError(
        f"{job.run}: diverged at step {record.step}: {what}. Gradient norm {record.gradient_norm:g}, learning rate "
        f"{record.learning_rate:g}; {skipped.total} of {record.step} steps were skipped. {kept} "
        f"({job.checkpoint_collection}). The same command would repeat these steps bit for bit: try a lower "
        f"optimizer.learning_rate, a longer optimizer.warmup_steps or another train.seed."
    )
