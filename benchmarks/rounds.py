"""Runs the rows of a benchmark in rounds, so that other load on the machine meets all rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def measure_rounds(rows: Sequence[str], rounds: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """Measure every row once per round; returns the measurements of all rounds by row."""
    measured: dict[str, list[T]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            print(f"round {number + 1} of {rounds}: {row}", file=sys.stderr, flush=True)
            measured[row].append(measure(row))
    return measured
