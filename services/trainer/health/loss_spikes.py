"""Detects loss spikes, and decides which batches a run leaves out after one.

The policy is PaLM's (arXiv 2204.02311, section 5.1): go back to a checkpoint before the spike and skip the batches seen
before and during it. A loss is measured before its step's update, so the batch that ruins the weights is never later
than the first with a high loss: the run goes back `train.loss_spike_rollback_steps` steps, and leaves out all batches
from there to the last one of the spike.

A loss deviates above `robust_limit`; a spike is confirmed once `train.loss_spike_patience_steps` losses in a row
deviate. A high gradient norm alone confirms nothing, because clipping bounds its update, but where a high loss follows,
the deviation starts with it. That test of both numbers and the default window are those of OLMo-core's
`SkipStepOptimizer`. Everything that decides is in a checkpoint (`LossSpikes`), so a killed run decides the same again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum, IntEnum, auto

import numpy as np

from services.common.artifacts.checkpoint import BatchRange, LossSpikes, merge_ranges
from services.common.recipe.schema import Model, Recipe
from services.trainer.job import Job
from services.trainer.metrics.events import record_event

MIN_LOSS_RISE = 0.1
"""Nats per token above the trend below which no loss deviates. The losses of large batches scatter by a hundredth of a
nat, and drift by more."""
MIN_NORM_FACTOR = 3.0
"""Multiple of the trend below which no gradient norm deviates."""
MIN_NORM = 1e-30
"""Gradient norm as which a smaller one counts, so that each has a logarithm."""
UNTRAINED_MARGIN = 0.5
"""Nats per token above the loss of an untrained model beyond which every loss deviates."""
STANDARD_DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""


class Deviation(IntEnum):
    """Number of a step that is above its limit. The largest of all workers' deviations counts for all."""

    NONE = 0
    GRADIENT_NORM = 1
    """The gradient norm alone."""
    LOSS = 2


class Verdict(Enum):
    """Meaning of a step's loss for the run."""

    NORMAL = auto()
    DEVIATING = auto()
    """The loss deviates, but not for long enough to be a spike."""
    HEALED = auto()
    """The loss is back below its limit, before a spike was confirmed."""
    SPIKE = auto()


class SpikeDetector:
    """Compares losses and gradient norms with those before them, and maps steps to batches.

    Steps are numbered from 1, as in records.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._train, self._untrained_loss = recipe.train, untrained_loss(recipe.model)
        self._skipped: tuple[BatchRange, ...] = ()
        self._rollbacks = 0
        self._losses: deque[float] = deque(maxlen=self._train.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=self._train.loss_spike_window)
        self._first_step: int | None = None
        self._deviating_losses = 0

    def go_back(self, state: LossSpikes) -> None:
        """Continue from a checkpoint's state. Batches that were skipped after that checkpoint stay skipped."""
        self._skipped = merge_ranges([*self._skipped, *state.skipped_batches])
        self._rollbacks = max(self._rollbacks, state.rollbacks)
        self.accept()
        if self._train.loss_spike_sigma:
            self._losses.extend(state.recent_losses)
            self._norms.extend(state.recent_gradient_norms)
            self._first_step, self._deviating_losses = state.first_deviating_step, state.deviating_losses

    def batch_of(self, step: int) -> int:
        """Return the number of the batch that follows `step` steps. The cost grows with the number of ranges."""
        batch = step
        for skipped in self._skipped:
            if batch < skipped.first:
                break
            batch += len(skipped)
        return batch

    def limits(self) -> tuple[float, float]:
        """Return the largest loss and the largest gradient norm that do not deviate."""
        train = self._train
        if not train.loss_spike_sigma or len(self._losses) < train.loss_spike_window // 4:
            return math.inf, math.inf
        half_width = train.loss_spike_window // 16
        loss = robust_limit(self._losses, train.loss_spike_sigma, MIN_LOSS_RISE, half_width)
        logarithms = [math.log(max(norm, MIN_NORM)) for norm in self._norms]
        norm = robust_limit(logarithms, train.loss_spike_sigma, math.log(MIN_NORM_FACTOR), half_width)
        return min(loss, self._untrained_loss + UNTRAINED_MARGIN), math.exp(min(norm, 700.0))

    def deviation(self, loss: float, gradient_norm: float) -> Deviation:
        """Compare a step's numbers with their limits. A loss that is not finite is above each limit but infinity."""
        largest_loss, largest_norm = self.limits()
        if loss > largest_loss or (largest_loss < math.inf and not math.isfinite(loss)):
            return Deviation.LOSS
        return Deviation.GRADIENT_NORM if gradient_norm > largest_norm else Deviation.NONE

    def add(self, step: int, loss: float, gradient_norm: float, deviation: Deviation) -> Verdict:
        """Add the numbers of a step and return their meaning. All workers pass the same deviation."""
        train = self._train
        if not train.loss_spike_sigma:
            return Verdict.NORMAL
        if deviation is Deviation.LOSS:
            if not self._deviating_losses:
                self._first_step = max(self._first_step or step, step - train.loss_spike_patience_steps)
            self._deviating_losses += 1
            return Verdict.SPIKE if self._deviating_losses >= train.loss_spike_patience_steps else Verdict.DEVIATING
        is_healed = self._deviating_losses > 0
        self._first_step = (self._first_step or step) if deviation and not is_healed else None
        self._deviating_losses = 0
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self._losses.append(loss)
            self._norms.append(gradient_norm)
        return Verdict.HEALED if is_healed else Verdict.NORMAL

    @property
    def first_step(self) -> int:
        """First step of the deviation that is going on."""
        assert self._first_step is not None
        return self._first_step

    @property
    def has_rollback_left(self) -> bool:
        return self._rollbacks < self._train.loss_spike_max_rollbacks

    @property
    def wanted_step(self) -> int:
        """Number of steps done at which the run shall go on after the spike that was confirmed."""
        return max(0, self.first_step - 1 - self._train.loss_spike_rollback_steps)

    def skip(self, from_step: int, last_batch: int) -> BatchRange:
        """Skip the batches from the one that follows `from_step` steps to `last_batch`, and return their range."""
        skipped = BatchRange(first=self.batch_of(from_step), last=last_batch)
        self._skipped = merge_ranges([*self._skipped, skipped])
        self._rollbacks += 1
        return skipped

    def accept(self) -> None:
        """Go on from a spike without a rollback: the next losses are compared with those after it alone."""
        self._losses.clear()
        self._norms.clear()
        self._first_step, self._deviating_losses = None, 0

    def record(self, job: Job, verdict: Verdict, step: int, loss: float) -> None:
        """Record an event if a deviation has healed or a spike is confirmed."""
        if verdict is Verdict.HEALED:
            record_event(job, "loss_healed", step=step, loss=loss)
        elif verdict is Verdict.SPIKE:
            record_event(job, "loss_spike", step=step, first_step=self.first_step, loss=loss, limit=self.limits()[0])
            if not self.has_rollback_left:
                record_event(job, "rollbacks_exhausted", step=step, rollbacks=self._rollbacks)

    def record_end(self, job: Job, step: int) -> None:
        """Record an event if the run ends while its loss deviates, before a spike could be confirmed."""
        if self._deviating_losses:
            record_event(job, "loss_deviates_at_end", step=step, first_step=self.first_step)

    @property
    def state(self) -> LossSpikes:
        """State for a checkpoint."""
        return LossSpikes(
            skipped_batches=self._skipped,
            rollbacks=self._rollbacks,
            recent_losses=tuple(self._losses),
            recent_gradient_norms=tuple(self._norms),
            first_deviating_step=self._first_step,
            deviating_losses=self._deviating_losses,
        )


def robust_limit(values: Sequence[float], sigma: float, least_rise: float, half_width: int) -> float:
    """Return the largest value that does not deviate from the trend of `values`, which are in the order of steps.

    The trend is a running median of `2 * half_width + 1` values, and the limit is its smallest median plus `sigma`
    standard deviations, by the median absolute deviation of the values from the trend. A mean and a standard deviation
    would count a falling trend as scatter. In 100 simulated curves of 2,700 heavy-tailed losses at most 2 in a row were
    above the limit of 6 standard deviations.
    """
    array = np.asarray(values)
    trend = np.median(np.lib.stride_tricks.sliding_window_view(array, 2 * half_width + 1), axis=1)
    scatter = np.median(np.abs(array[half_width : len(array) - half_width] - trend))
    return float(trend.min() + max(sigma * STANDARD_DEVIATIONS_PER_MAD * scatter, least_rise))


def untrained_loss(model: Model) -> float:
    """Return the expected loss of an untrained model in nats per token: that of even odds, and the variance of logits.

    A logit is the product of a normalised hidden state and a row of weights of `initializer_range`.
    """
    return math.log(model.vocab_size) + 0.5 * model.hidden_size * model.initializer_range**2
