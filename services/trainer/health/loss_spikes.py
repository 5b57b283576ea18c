"""A loss far above the last ones: the run goes back to its newest checkpoint, and on without that batch.

As PaLM did (arXiv 2204.02311, section 5.1), and with the test of OLMo's skip-step optimizer. The batches that are left
out and the losses that the next one is compared with are part of a checkpoint. So all is a function of the checkpoint:
a run that is killed between a spike and the next checkpoint meets the same spike again and decides the same.
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
"""Left out, one after the other: where the loss spikes on the next one too, the batches are not the cause."""


class SpikeDetector:
    """Compares losses, and knows which batch a step takes."""

    def __init__(self, train: Train, state: LossSpikes | None) -> None:
        self._sigma, self._window = train.loss_spike_sigma, train.loss_spike_window
        self.skipped_batches: frozenset[int] = frozenset()
        self._losses: deque[float] = deque(maxlen=self._window)
        self.go_back(state)

    def go_back(self, state: LossSpikes | None) -> None:
        """Continue from a checkpoint's state; batches that were left out since stay so."""
        self._losses.clear()
        if state:
            self.skipped_batches |= set(state.skipped_batches)
            self._losses.extend(state.recent_losses)

    def batch_of(self, step: int) -> int:
        """Number of the batch that step number `step` (from 0) takes."""
        batch = step
        for skipped in sorted(self.skipped_batches):
            batch += skipped <= batch
        return batch

    def limit(self) -> float:
        """The largest loss that is no spike."""
        if not self._sigma or len(self._losses) < self._window:
            return float("inf")
        return statistics.fmean(self._losses) + self._sigma * statistics.pstdev(self._losses)

    def add(self, loss: float) -> None:
        """Of a step that was applied and whose loss is no spike."""
        if self._sigma and math.isfinite(loss):
            self._losses.append(loss)

    def skip_batch(self, batch: int) -> bool:
        """Leave out a batch from now on; False when too many were left out right before it."""
        self.skipped_batches |= {batch}
        return not self.skipped_batches.issuperset(range(batch - MAX_BATCHES_IN_A_ROW, batch))

    @property
    def state(self) -> LossSpikes | None:
        """What a checkpoint holds of it."""
        if not self._sigma:
            return None
        return LossSpikes(skipped_batches=tuple(sorted(self.skipped_batches)), recent_losses=tuple(self._losses))


def spiked_for_ever(job: Job, step: int, loss: float, limit: float) -> RecipeError:
    """What a run ends with whose loss spikes on whatever batch comes."""
    return RecipeError(
        f"{job.run}: the run diverged at step {step}: its loss is {loss:g}, train.loss_spike_sigma "
        f"{job.recipe.train.loss_spike_sigma:g} allows {limit:g}, and {MAX_BATCHES_IN_A_ROW} batches right before it "
        f"were left out for the same. The same command would repeat this bit for bit. Change what the run is made of, "
        f"first of all a lower optimizer.learning_rate, or allow more with train.loss_spike_sigma: that begins a run "
        f"of its own. Checkpoints stay in {job.checkpoint_collection}."
    )
