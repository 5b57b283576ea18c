"""Which worker the others wait for: the time until its own gradient is there, compared over some steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from services.common.program.worker_group import WorkerGroup

STEPS = 10
"""Compared at a time: an exchange takes longer than the one with which workers agree to stop, so it is not each step's.
"""
NOTABLE_SCORE = 1.5
NOTABLE_SECONDS = 10.0
"""That the others waited in these steps: steps of milliseconds differ by as much on any machine that has other work."""


class Stragglers:
    """Of one start of the workers. Under tensor parallelism the workers of a model wait for one another all the time:
    then models are compared, by any of their workers."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._own_seconds: list[float] = []
        self._told: set[int] = set()
        self.metrics: dict[str, float] = {}
        """`slowest_rank`, and `straggler_score`, its time over that of the median worker; nothing of one that is alone,
        or before enough steps."""

    def add(self, seconds: float) -> int | None:
        """Of this worker's step; all workers call it. Returns the rank of one that is found far behind for the first
        time."""
        self._own_seconds.append(seconds)
        if len(self._own_seconds) < STEPS or self._group.world_size == 1:
            return None
        workers = self._group.gather_numbers([sum(self._own_seconds)])
        self._own_seconds.clear()
        return self._compare([total for (total,) in workers])

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
