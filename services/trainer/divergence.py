"""A run whose numbers diverge ends: the same steps from the same checkpoint would diverge again."""

from __future__ import annotations

from services.common.errors import RecipeError
from services.trainer.checkpoint import newest_step
from services.trainer.job import Job
from services.trainer.metrics import StepRecord

ENDED_BY = "divergence"


class SkippedSteps:
    """Counts the steps whose update was not applied because a gradient was not finite."""

    def __init__(self, job: Job, total: int) -> None:
        self._limit = job.recipe.train.max_consecutive_skipped_steps
        self.total = total
        """Since the begin of the run."""
        self.in_a_row = 0
        """Up to the newest step of this process; 0 when that one was applied."""

    def count(self, is_applied: bool) -> None:
        self.total += not is_applied
        self.in_a_row = 0 if is_applied else self.in_a_row + 1

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row > self._limit


def diverged(job: Job, record: StepRecord, skipped: SkippedSteps) -> RecipeError:
    """What a run that diverged ends with: exit 2, for no retry can help."""
    train, newest = job.recipe.train, newest_step(job.checkpoint_collection)
    if skipped.are_too_many:
        what = (
            f"{skipped.in_a_row} steps in a row were skipped because their gradients were not finite, "
            f"train.max_consecutive_skipped_steps is {train.max_consecutive_skipped_steps}"
        )
    else:
        what = "its weights are not finite any more, so they were not saved"
    kept = f"the newest is that of step {newest}" if newest is not None else "there is none yet"
    return RecipeError(
        f"{job.run}: the run diverged at step {record.step}: {what}. The last gradient norm is "
        f"{record.gradient_norm:g}, the learning rate is {record.learning_rate:g}; in all {skipped.total} of "
        f"{record.step} steps were skipped. The same command would repeat these steps bit for bit. "
        f"Change what they are made of, first of all a lower optimizer.learning_rate, a longer optimizer.warmup_steps "
        f"or another train.seed: that begins a run of its own. Checkpoints stay in {job.checkpoint_collection}; {kept}."
    )
