"""Keeps the measured times of this version's starts and restarts, which the plan and its documents go by.

`python -m benchmarks.trainer.start_rows --root fsx` measures them for recipes/tiny-cpu.toml with a warm compile cache.
A test compares them with the table in docs/benchmarks/trainer.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartTimes:
    """Seconds in which processes start, import and meet: the model is so small that its weights add nothing."""

    first_step_seconds: float
    """Seconds from the command's start to the end of the first step."""
    restart_seconds: float
    """Seconds from the kill of a worker to the end of the first step of its replacement."""


MEASURED_ON = "2 cores of an AMD EPYC"
MEASURED_TIMES = {"inline": StartTimes(4.5, 1.5), "ray": StartTimes(13.9, 1.4)}
"""Medians of three rounds, by launcher. The launcher `ray` starts a Ray of its own, which a cluster already has."""
