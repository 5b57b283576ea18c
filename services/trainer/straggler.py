"""Which worker the others wait for: the time until its gradient is there, compared over the last steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

STEPS = 20
NOTABLE_SCORE = 1.5
NOTABLE_SECONDS = 10.0
"""That the others waited in these steps: steps of milliseconds differ by as much on any machine that has other work."""


class StragglerScore:
    """Of one start of the workers. Under tensor parallelism the workers of a model wait for one another all the time:
    then models are compared, by any of their workers."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=STEPS)
        self._told: set[int] = set()
        self._waited_seconds = 0.0
        self.slowest_rank = 0
        self.score = 1.0
        """Time of the slowest worker over that of the median one."""

    def add(self, seconds: Sequence[float]) -> None:
        """Of each worker, in the order of their ranks."""
        self._steps.append(seconds)
        means = [statistics.fmean(worker) for worker in zip(*self._steps, strict=True)]
        self.slowest_rank = max(range(len(means)), key=means.__getitem__)
        median = statistics.median_low(means)
        self.score = means[self.slowest_rank] / median if median > 0 else 1.0
        self._waited_seconds = (means[self.slowest_rank] - median) * len(self._steps)

    def find_new(self) -> int | None:
        """The rank of a worker that is far behind, over enough steps, when it is found for the first time."""
        if len(self._steps) < STEPS or self.slowest_rank in self._told:
            return None
        if self.score < NOTABLE_SCORE or self._waited_seconds < NOTABLE_SECONDS:
            return None
        self._told.add(self.slowest_rank)
        return self.slowest_rank
