"""Finds the worker that the others wait for, by the seconds that each worker needs for its own gradient."""

from __future__ import annotations

STEPS = 10
"""Steps in one comparison: in a single one, any worker that the machine interrupted is the slowest."""
NOTABLE_SCORE = 1.5
"""Smallest ratio of a straggler's seconds to the fastest worker's."""
NOTABLE_SECONDS = 10.0
"""Smallest number of seconds that the others waited for a straggler in these steps."""


class Stragglers:
    """Compares the workers of one start. Each worker adds up its own seconds, and all compare the same reduced numbers.

    Under tensor parallelism the workers of one model wait for each other, so any of them stands for the whole model.
    """

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._reported: set[int] = set()
        self.metrics: dict[str, float] = {}
        """`slowest_rank` and `straggler_score`, the ratio of its seconds to the fastest worker's, once compared."""

    def add(self, seconds: float) -> float:
        """Add this worker's seconds for one step. Returns its total after STEPS steps, and otherwise 0."""
        self._steps.append(seconds)
        if len(self._steps) < STEPS:
            return 0.0
        total = sum(self._steps)
        self._steps.clear()
        return total

    def compare(self, slowest_rank: int, slowest_seconds: float, fastest_seconds: float) -> int | None:
        """Compare the totals of all workers. Returns the rank of a straggler when it is found for the first time."""
        score = slowest_seconds / fastest_seconds if fastest_seconds > 0 else 1.0
        self.metrics = {"slowest_rank": slowest_rank, "straggler_score": score}
        is_notable = score >= NOTABLE_SCORE and slowest_seconds - fastest_seconds >= NOTABLE_SECONDS
        if not is_notable or slowest_rank in self._reported:
            return None
        self._reported.add(slowest_rank)
        return slowest_rank
