"""Reduces what the workers know of a step to a fixed count of numbers, which are the same on every worker.

A worker gives 13 numbers. They become 33, whatever the number of workers: sums, extremes, and the first ranks with each
outcome. Reducing is associative, so that a node reduces the steps of its workers, and nodes reduce what others have.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple, Self

from services.common.errors import WorkersLost
from services.common.process.stop_reason import StopReason
from services.trainer.health.loss_spikes import Deviation
from services.trainer.metrics.metric_table import UNKNOWN_NUMBERS, ReducedNumbers, WorkerNumbers

NAMED_RANKS = 8
"""Most ranks that are named where workers decided differently; the others are counted."""
_NO_RANK = -1


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

    def encode(self) -> list[float]:
        *facts, numbers = self
        return [*map(float, facts), *numbers]

    @classmethod
    def decode(cls, encoded: Sequence[float]) -> Self:
        stop_reason, written_step, deviation, is_applied, compared_seconds, *numbers = encoded
        return cls(
            StopReason(int(stop_reason)),
            int(written_step),
            Deviation(int(deviation)),
            bool(is_applied),
            compared_seconds,
            WorkerNumbers(*numbers),
        )


class RankSet(NamedTuple):
    """A number of ranks, of which the lowest NAMED_RANKS are known."""

    size: int
    named: tuple[int, ...]
    """The lowest ranks, in ascending order."""

    @classmethod
    def of(cls, *ranks: int) -> Self:
        return cls(len(ranks), ranks)

    def joined(self, other: Self) -> Self:
        return type(self)(self.size + other.size, tuple(sorted(self.named + other.named)[:NAMED_RANKS]))

    def encode(self) -> list[float]:
        missing = NAMED_RANKS - len(self.named)
        return [float(self.size), *map(float, self.named), *[float(_NO_RANK)] * missing]

    @classmethod
    def decode(cls, encoded: Iterator[float]) -> Self:
        size, *named = (int(next(encoded)) for _ in range(1 + NAMED_RANKS))
        return cls(size, tuple(rank for rank in named if rank != _NO_RANK))

    def __str__(self) -> str:
        unnamed = self.size - len(self.named)
        ranks = ", ".join(str(rank) for rank in self.named)
        return f"rank {ranks} and {unnamed} more ranks" if unnamed else f"rank {ranks}"


class ReducedStep(NamedTuple):
    """A step as all workers see it together."""

    stop_reason: StopReason
    """The strongest reason of any worker."""
    written_step: int
    """Step of the checkpoint of which all workers have written their shards; 0 for none."""
    deviation: Deviation
    """The largest deviation of any worker."""
    applied: RankSet
    """Ranks whose step updated the weights."""
    skipped: RankSet
    """Ranks whose step did not update the weights."""
    slowest_rank: int
    slowest_seconds: float
    """`compared_seconds` of the slowest rank."""
    median_seconds: float
    """`compared_seconds` of the median worker of the node where that is smallest. A median over all workers would take
    a message for each of them; a node that is slow as a whole has no say in this one.
    """
    numbers: ReducedNumbers

    @classmethod
    def of_worker(cls, rank: int, step: WorkerStep) -> Self:
        own, none = RankSet.of(rank), RankSet.of()
        return cls(
            step.stop_reason,
            step.written_step,
            step.deviation,
            applied=own if step.is_applied else none,
            skipped=none if step.is_applied else own,
            slowest_rank=rank,
            slowest_seconds=step.compared_seconds,
            median_seconds=step.compared_seconds,
            numbers=ReducedNumbers.of_worker(step.numbers),
        )

    @classmethod
    def of_node(cls, first_rank: int, steps: Sequence[WorkerStep]) -> Self:
        """Reduce the steps of a node's workers, whose ranks begin with `first_rank`."""
        of_workers = (cls.of_worker(rank, step) for rank, step in enumerate(steps, first_rank))
        median = statistics.median_low(step.compared_seconds for step in steps)
        return reduce(cls.joined, of_workers)._replace(median_seconds=median)

    def joined(self, other: Self) -> Self:
        """Reduce two steps of different workers; those of `self` have the lower ranks."""
        slower = max(self, other, key=lambda each: each.slowest_seconds)  # the lower rank of equally slow ones
        return type(self)(
            max(self.stop_reason, other.stop_reason),
            min(self.written_step, other.written_step),
            max(self.deviation, other.deviation),
            self.applied.joined(other.applied),
            self.skipped.joined(other.skipped),
            slower.slowest_rank,
            slower.slowest_seconds,
            min(self.median_seconds, other.median_seconds),
            self.numbers.joined(other.numbers),
        )

    def encode(self) -> tuple[float, ...]:
        return (
            float(self.stop_reason),
            float(self.written_step),
            float(self.deviation),
            *self.applied.encode(),
            *self.skipped.encode(),
            float(self.slowest_rank),
            self.slowest_seconds,
            self.median_seconds,
            *self.numbers,
        )

    @classmethod
    def decode(cls, encoded: Sequence[float]) -> Self:
        left = iter(encoded)
        stop_reason, written_step, deviation = (int(next(left)) for _ in range(3))
        applied, skipped = RankSet.decode(left), RankSet.decode(left)
        slowest_rank, slowest_seconds, median_seconds, *numbers = left
        return cls(
            StopReason(stop_reason),
            written_step,
            Deviation(deviation),
            applied,
            skipped,
            int(slowest_rank),
            slowest_seconds,
            median_seconds,
            ReducedNumbers(*numbers),
        )


def join_encoded(lower: Sequence[float], higher: Sequence[float]) -> tuple[float, ...]:
    """Reduce two encoded steps; the first one is of nodes with lower ranks."""
    return ReducedStep.decode(lower).joined(ReducedStep.decode(higher)).encode()


def require_same_outcome(reduced: ReducedStep, step: int) -> None:
    """Raise `WorkersLost` where a step updated the weights on some workers only: all decide by the same norm."""
    if not (reduced.applied.size and reduced.skipped.size):
        return
    is_skipped_by_fewer = reduced.skipped.size < reduced.applied.size
    fewer, outcome = (reduced.skipped, "skipped") if is_skipped_by_fewer else (reduced.applied, "applied")
    raise WorkersLost(
        f"step {step} was {outcome} on {fewer} only, but all workers decide from the same gradient norm. The same "
        f"command continues. If the same node causes this again, replace it."
    )
