"""Lets all workers agree on a step while they compute the next one: one small collective on their hosts.

Each worker gives 16 doubles of which all learn the largest, so that the message has one size and one operation,
whatever the number of workers. A number of which the smallest counts is sent with its sign changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from services.common.errors import WorkersLost
from services.common.process.shutdown import StopReason
from services.common.program.process_group import ProcessGroup
from services.trainer.health.loss_spikes import Deviation
from services.trainer.metrics.metric_table import UNKNOWN_NUMBERS, ReducedNumbers, WorkerNumbers

MAX_WORKERS = 2**22
"""Ranks that fit beside milliseconds into a double."""


class WorkerStep(NamedTuple):
    """A step, or a round of an evaluation, as one worker sees it."""

    stop_reason: StopReason
    written_step: int
    """Step of the checkpoint that is being written, once the worker has written its shard of it; 0 before."""
    deviation: Deviation = Deviation.NONE
    """Whether the step's loss or gradient norm is above the limit of the worker's spike detector."""
    is_applied: bool = True
    """Whether the step updated the weights."""
    compared_seconds: float = 0.0
    """Seconds by which stragglers are found; 0 after steps that end no comparison. See `Stragglers`."""
    numbers: WorkerNumbers = UNKNOWN_NUMBERS

    def encode(self, rank: int) -> list[float]:
        """Return the numbers of which the largest of all workers counts. NaN is sent as infinity, which stays."""
        numbers = [*self.numbers, -self.numbers.gradient_seconds]
        return [
            float(self.stop_reason),
            float(-self.written_step),
            float(self.deviation),
            float(self.is_applied),
            float(not self.is_applied),
            _join_rank(self.compared_seconds, rank),
            -self.compared_seconds,
            *(math.inf if math.isnan(number) else number for number in numbers),
        ]


class AgreedStep(NamedTuple):
    """A step as all workers see it together."""

    stop_reason: StopReason
    """The strongest reason of any worker."""
    written_step: int
    """Step of the checkpoint of which all workers have written their shards; 0 for none."""
    deviation: Deviation
    """The largest deviation of any worker."""
    is_applied_by_some: bool
    """Whether the step updated the weights on some worker."""
    is_skipped_by_some: bool
    """Whether the step did not update the weights on some worker."""
    slowest_rank: int
    slowest_seconds: float
    """`compared_seconds` of the slowest worker, in whole milliseconds."""
    fastest_seconds: float
    """`compared_seconds` of the fastest worker."""
    numbers: ReducedNumbers

    @classmethod
    def decode(cls, largest: Sequence[float]) -> Self:
        stop_reason, written_step, deviation, applied, skipped, slowest, fastest, *numbers = largest
        slowest_seconds, slowest_rank = _split_rank(slowest)
        *largest_numbers, least = (math.nan if math.isinf(number) else number for number in numbers)
        return cls(
            StopReason(int(stop_reason)),
            int(-written_step),
            Deviation(int(deviation)),
            bool(applied),
            bool(skipped),
            slowest_rank,
            slowest_seconds,
            -fastest,
            ReducedNumbers(WorkerNumbers._make(largest_numbers), -least),
        )


class StepAgreement:
    """One worker's part in the agreement on steps. All workers begin and finish the same agreements, in turns."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._wait: Callable[[], list[float]] | None = None

    def begin(self, step: WorkerStep) -> None:
        """Give this worker's part of the next agreement. Returns at once."""
        assert self._wait is None, "the agreement before is not finished"
        self._wait = self._group.start_maximum(step.encode(self._group.rank))

    def finish(self) -> AgreedStep:
        """Return what all workers agree on, once all of them have begun this agreement.

        Raises `WorkersLost` if another worker is lost, or takes longer than a collective may.
        """
        assert self._wait is not None, "no agreement has begun"
        wait, self._wait = self._wait, None
        return AgreedStep.decode(wait())


def require_same_outcome(agreed: AgreedStep, is_applied: bool, group: ProcessGroup, step: int) -> None:
    """Raise `WorkersLost` where a step updated the weights on some workers only: all decide by the same norm.

    All workers call this; they exchange their outcomes only where these differ.
    """
    if not (agreed.is_applied_by_some and agreed.is_skipped_by_some):
        return
    outcomes = group.gather(is_applied)
    fewer = min((True, False), key=outcomes.count)
    ranks = [rank for rank, outcome in enumerate(outcomes) if outcome is fewer]
    raise WorkersLost(
        f"step {step} was {'applied' if fewer else 'skipped'} on rank {ranks[0]} and {len(ranks) - 1} others only, but "
        f"all decide by the same gradient norm. The same command continues; replace the node if it causes this again."
    )


def _join_rank(seconds: float, rank: int) -> float:
    """Return whole milliseconds and a rank in one double, which is larger for the lower of two ranks."""
    return float(round(seconds * 1e3) * MAX_WORKERS + MAX_WORKERS - 1 - rank)


def _split_rank(joined: float) -> tuple[float, int]:
    milliseconds, rank = divmod(int(joined), MAX_WORKERS)
    return milliseconds / 1e3, MAX_WORKERS - 1 - rank
