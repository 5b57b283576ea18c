"""Detects loss spikes: the run goes back to its newest checkpoint and continues without the batch of the spike.

This is PaLM's remedy (arXiv 2204.02311, section 5.1), with the test of OLMo's skip-step optimizer. The skipped batches
and the recent losses are part of a checkpoint. So every decision is a function of the checkpoint: a run that is killed
between a spike and the next checkpoint meets the same spike again and decides the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from services.common.artifacts.checkpoint import LossSpikes
from services.common.errors import RecipeError
from services.common.recipe.schema import Train
from services.trainer.job import Job

MAX_BATCHES_IN_A_ROW = 3
"""Number of successive batches that a run may skip: if the loss spikes on the next one too, no batch is the cause."""


class SpikeDetector:
    """Compares each loss with the losses before it, and maps steps to batches."""

    def __init__(self, train: Train, state: LossSpikes | None) -> None:
        self._sigma, self._window = train.loss_spike_sigma, train.loss_spike_window
        self.skipped_batches: frozenset[int] = frozenset()
        self._losses: deque[float] = deque(maxlen=self._window)
        self.go_back(state)

    def go_back(self, state: LossSpikes | None) -> None:
        """Continue from a checkpoint's state. Batches that were skipped after that checkpoint stay skipped."""
        self._losses.clear()
        if state:
            self.skipped_batches |= set(state.skipped_batches)
            self._losses.extend(state.recent_losses)

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that step number `step` (from 0) takes."""
        batch = step
        for skipped in sorted(self.skipped_batches):
            batch += skipped <= batch
        return batch

    def limit(self) -> float:
        """Return the largest loss that is not a spike; infinity until the window of losses is full."""
        if not self._sigma or len(self._losses) < self._window:
            return float("inf")
        return statistics.fmean(self._losses) + self._sigma * statistics.pstdev(self._losses)

    def add(self, loss: float) -> None:
        """Add the loss of a step that was applied and did not spike."""
        if self._sigma and math.isfinite(loss):
            self._losses.append(loss)

    def skip_batch(self, batch: int) -> bool:
        """Skip a batch from now on. Return False if MAX_BATCHES_IN_A_ROW batches right before it were skipped too."""
        self.skipped_batches |= {batch}
        return not self.skipped_batches.issuperset(range(batch - MAX_BATCHES_IN_A_ROW, batch))

    @property
    def state(self) -> LossSpikes | None:
        """State for a checkpoint; None if the recipe has no `train.loss_spike_sigma`."""
        if not self._sigma:
            return None
        return LossSpikes(skipped_batches=tuple(sorted(self.skipped_batches)), recent_losses=tuple(self._losses))


def spiked_for_ever(job: Job, step: int, loss: float, limit: float) -> RecipeError:
    """Make the error of a run whose loss spikes on every batch. Its exit code is 2."""
    return RecipeError(
        f"{job.run}: the run diverged at step {step}: its loss is {loss:g}, train.loss_spike_sigma "
        f"{job.recipe.train.loss_spike_sigma:g} allows {limit:g}, and the {MAX_BATCHES_IN_A_ROW} batches right before "
        f"were skipped for the same reason. The same command would repeat this bit for bit. Change the recipe, which "
        f"begins another run: try a lower optimizer.learning_rate or a larger train.loss_spike_sigma. Checkpoints stay "
        f"in {job.checkpoint_collection}."
    )
