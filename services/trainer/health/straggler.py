"""Finds the worker that the others wait for, by the seconds that each worker needs for its own gradient."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

STEPS = 10
"""Number of steps in one comparison. In a single step, any worker that the machine interrupted is the slowest."""
NOTABLE_SCORE = 1.5
"""Smallest ratio of a straggler's seconds to the median worker's."""
NOTABLE_SECONDS = 10.0
"""Smallest number of seconds that the others waited for a straggler in these steps. Workers with steps of milliseconds
reach NOTABLE_SCORE on any busy machine.
"""


class Stragglers:
    """Compares the workers of one start.

    Under tensor parallelism the workers of one model wait for each other in every layer, so any of them stands for the
    whole model.
    """

    def __init__(self) -> None:
        self._steps: list[Sequence[float]] = []
        self._reported: set[int] = set()
        self.metrics: dict[str, float] = {}
        """`slowest_rank` and `straggler_score`, the ratio of its seconds to the median worker's. Empty for a single
        worker, and before the first comparison.
        """

    def add(self, seconds: Sequence[float]) -> int | None:
        """Add the seconds of all workers for one step, by rank.

        Returns the rank of a straggler when it is found for the first time.
        """
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
        if not is_notable or slowest in self._reported:
            return None
        self._reported.add(slowest)
        return slowest
