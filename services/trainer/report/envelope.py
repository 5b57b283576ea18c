"""Reduces the curve of a run of any length to a bounded number of points that keep its minima and maxima."""

from __future__ import annotations

import math
from typing import NamedTuple

NUM_BUCKETS = 512
"""Most buckets of an envelope. A chart of a column is about 560 pixels wide, and a bucket has two points."""


class Point(NamedTuple):
    """A value after a step of a run."""

    step: int
    value: float


class Envelope:
    """Collects the values of a curve, in any order of their steps, in memory that does not grow with their number.

    Steps are divided into buckets of equal width, and each bucket keeps its smallest and its largest value. Whenever
    there are more than `num_buckets` buckets, their width is doubled and neighbours are merged, so adding a value costs
    O(1) on average. A curve of up to `num_buckets` steps is kept as it is.
    """

    def __init__(self, num_buckets: int = NUM_BUCKETS) -> None:
        self._num_buckets, self._width = num_buckets, 1
        self._buckets: dict[int, _Bucket] = {}
        self._first: Point | None = None
        self._last: Point | None = None

    def add(self, step: int, value: float) -> None:
        """Add a value. One that is infinite or no number is left out: a curve has a gap there."""
        if not math.isfinite(value):
            return
        point = Point(step, value)
        self._first = point if self._first is None else min(self._first, point)
        self._last = point if self._last is None else max(self._last, point)
        _put(self._buckets, step // self._width, _Bucket(point, point, value, 1))
        while len(self._buckets) > self._num_buckets:
            self._width *= 2
            merged: dict[int, _Bucket] = {}
            for number, bucket in self._buckets.items():
                _put(merged, number // 2, bucket)
            self._buckets = merged

    def points(self) -> list[Point]:
        """Return the smallest and the largest value of each bucket, and the first and last value, by step."""
        ends = [point for point in (self._first, self._last) if point is not None]
        return sorted({*ends, *(point for bucket in self._buckets.values() for point in (bucket.low, bucket.high))})

    def means(self, num_windows: int) -> list[Point]:
        """Return the moving mean over a window of 1 / `num_windows` of the curve, at the middle of each bucket.

        At both ends the window is cut off. Raises `ValueError` for less than one window.
        """
        if num_windows < 1:
            raise ValueError(f"{num_windows} windows: expected at least 1")
        numbers = sorted(self._buckets)
        half = self.window_steps(num_windows) // self._width // 2
        totals = [0.0]
        counts = [0]
        for number in numbers:
            totals.append(totals[-1] + self._buckets[number].total)
            counts.append(counts[-1] + self._buckets[number].num_values)
        found, begin, end = list[Point](), 0, 0
        for number in numbers:
            while numbers[begin] < number - half:
                begin += 1
            while end < len(numbers) and numbers[end] <= number + half:
                end += 1
            bucket = self._buckets[number]
            middle = (bucket.low.step + bucket.high.step) // 2
            found.append(Point(middle, (totals[end] - totals[begin]) / (counts[end] - counts[begin])))
        return found

    def window_steps(self, num_windows: int) -> int:
        """Return the number of steps over which `means` takes the mean."""
        if self._first is None or self._last is None:
            return self._width
        half = (self._last.step - self._first.step + 1) // num_windows // self._width // 2
        return (2 * half + 1) * self._width

    @property
    def last(self) -> Point | None:
        """The value of the latest step; None if there is no value."""
        return self._last


class _Bucket(NamedTuple):
    low: Point
    high: Point
    total: float
    num_values: int


def _put(buckets: dict[int, _Bucket], number: int, added: _Bucket) -> None:
    known = buckets.get(number)
    if known is None:
        buckets[number] = added
        return
    low = added.low if added.low.value < known.low.value else known.low
    high = added.high if added.high.value > known.high.value else known.high
    buckets[number] = _Bucket(low, high, known.total + added.total, known.num_values + added.num_values)
