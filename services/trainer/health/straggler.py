"""Which worker the others wait for: the time until its own gradient is there, compared over some steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

STEPS = 10
"""Compared at a time: of one alone, a worker that the machine interrupted is the slowest."""
NOTABLE_SCORE = 1.5
NOTABLE_SECONDS = 10.0
"""That the others waited in these steps: steps of milliseconds differ by as much on any machine that has other work."""


class Stragglers:
    """Of one start of the workers. Under tensor parallelism the workers of a model wait for one another all the time:
    then models are compared, by any of their workers."""

    def __init__(self) -> None:
        self._steps: list[Sequence[float]] = []
        self._told: set[int] = set()
        self.metrics: dict[str, float] = {}
        """`slowest_rank`, and `straggler_score`, its time over that of the median worker; nothing of one that is alone,
        or before enough steps."""

    def add(self, seconds: Sequence[float]) -> int | None:
        """Of a step, each worker's by rank. Returns the rank of one that is found far behind for the first time."""
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return None
        totals = [sum(of_worker) for of_worker in zip(*self._steps, strict=True)]
        self._steps.clear()
        return self._compare(totals) if len(totals) > 1 else None

    def _compare(self, totals: Sequence[float]) -> int | None:
        slowest = max(range(len(totals)), key=totals.__getitem__)
        median = statistics.median_low(totals)
        score = totals[slowest] / median if median > 0 else 1.0
        self.metrics = {"slowest_rank": slowest, "straggler_score": score}
        is_notable = score >= NOTABLE_SCORE and totals[slowest] - median >= NOTABLE_SECONDS
        if not is_notable or slowest in self._told:
            return None
        self._told.add(slowest)
        return slowest
