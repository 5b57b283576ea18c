"""The curves of the charts of a page: collected from the records of steps and evaluations, and thinned."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Series(NamedTuple):
    """What a chart draws of one metric of the step records, or of `evaluation.FIELD`."""

    metric: str
    name: str = ""
    color: int = 0
    is_smooth: bool = False
    """Whether a moving mean is drawn over the curve of all steps."""
    errors: str = ""
    """Metric of the error bars."""


CHARTS: dict[str, tuple[Series, ...]] = {
    "loss": (
        Series("loss", "training", is_smooth=True),
        Series("evaluation.loss", "validation", 1, errors="evaluation.standard_error"),
    ),
    "validation-by-source": (Series("evaluation.loss_by_source"),),
    "bits-per-byte": (Series("evaluation.bits_per_byte", "validation", 1),),
    "worst-micro-batch": (Series("loss_max", "worst micro-batch", is_smooth=True),),
    "gradient-norm": (Series("gradient_norm", "gradient", is_smooth=True),),
    "learning-rate": (Series("learning_rate", "learning rate"),),
    "clipped": (Series("clipped_share", "clipped steps"),),
    "gradient-by-group": (Series("gradient_norm_by_group"),),
    "update-by-group": (Series("update_ratio_by_group"),),
    "largest-logit": (Series("largest_logit", "largest logit"),),
    "activations": (Series("activation_rms", "activations"),),
    "throughput": (Series("tokens_per_second", "all workers", is_smooth=True),),
    "mfu": (
        Series("mfu", "PaLM's convention", is_smooth=True),
        Series("mfu_causal", "causal attention counted once", 1, is_smooth=True),
    ),
    "goodput": (Series("goodput", "goodput"),),
    "step-time": (
        Series("step_seconds", "slowest worker", is_smooth=True),
        Series("gradient_seconds_spread", "spread between fastest and slowest", 1, is_smooth=True),
    ),
    "stragglers": (Series("straggler_score", "slowest over median"),),
    "data-wait": (Series("data_share", "share of a step", is_smooth=True),),
    "checkpoint-stall": (Series("checkpoint_stall_seconds", "stop"),),
    "evaluation-time": (Series("evaluation.seconds", "evaluation", 1),),
    "memory": (
        Series("peak_rss_bytes", "host memory"),
        Series("peak_device_bytes", "device memory", 1),
    ),
}
"""Series of the charts by the id of their figure in report.html, which has the titles."""
CHARTED_METRICS = frozenset(series.metric for chart in CHARTS.values() for series in chart)

MAX_POINTS = 1_002
"""Points of a curve on a page: two for each of 500 ranges of steps, and both ends."""
MAX_LABELS = 64
"""Curves of a metric at most: one for each value of its label, such as a source."""
MAX_MARKS = 150
"""Marks of one kind at most: more would be a solid line."""
MAX_DOTS = 100
"""Points of a curve that get dots: more would be a thick line."""
SMOOTH_WINDOWS = 40
"""A moving mean is taken over 1 / SMOOTH_WINDOWS of the run."""

_DISTORTED_BY_FIRST_STEP = frozenset({"step_seconds", "tokens_per_second", "data_share", "gradient_seconds_spread"})
"""The first step of a process loads or compiles the graphs."""
_EVENT_MARKS = frozenset({"rollback", "straggler"})

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Curve:
    """A curve as the page's script draws it."""

    name: str
    steps: list[int]
    values: list[float]
    color: int
    run: int = 0
    """Index of the run whose `positions` map the steps to tokens and time."""
    is_faint: bool = False
    """Drawn thin, pale and without a name in the legend, as the background of its moving mean."""
    has_dots: bool = False
    errors: list[float] | None = None
    """Half the length of each point's error bar."""


@dataclass(frozen=True)
class DrawnChart:
    """The data of a chart."""

    curves: list[Curve]
    reference: tuple[str, float] | None = None
    """Name and value of a horizontal line, such as a limit."""


class RunCurves:
    """The curves of a run, which hold 16 bytes for each value."""

    def __init__(self, evaluations: Sequence[Mapping[str, Any]] = ()) -> None:
        self.num_steps = 0
        self._columns: dict[str, dict[str, tuple[array[int], array[float]]]] = defaultdict(dict)
        self._marks: dict[str, list[int]] = defaultdict(list)
        self._began_at = math.inf
        for each in evaluations:
            for field in ("loss", "standard_error", "bits_per_byte", "seconds"):
                self._add(f"evaluation.{field}", "", each["step"], each.get(field))
            for source, mean in each["sources"].items() if len(each["sources"]) > 1 else ():
                self._add("evaluation.loss_by_source", source, each["step"], mean["loss"])

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of a step, in any order of the steps."""
        step, is_first = record["step"], record["is_first_of_process"]
        self.num_steps += 1
        for metric in CHARTED_METRICS.intersection(record):
            if is_first and metric in _DISTORTED_BY_FIRST_STEP:
                continue
            value = record[metric]
            for label, number in value.items() if isinstance(value, dict) else [("", value)]:
                self._add(metric, label, step, number)
        self._add("tokens", "", step, record.get("tokens", 0))
        self._add("time", "", step, record["time"])
        self._began_at = min(self._began_at, record.get("run_started_at") or math.inf)
        for kind, has_happened in (
            ("restart", is_first and record.get("restarts", 0) > 0),
            ("skipped", not math.isfinite(record["gradient_norm"])),
            ("checkpoint", "checkpoint_stall_seconds" in record),
        ):
            if has_happened:
                self._marks[kind].append(step)

    def positions(self) -> dict[str, list[float]]:
        """Return the tokens, and the seconds since the run began, after some steps and after the first and the last."""
        steps, tokens = self._column("tokens")
        _, times = self._column("time")
        kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).astype(int))
        began_at = self._began_at if math.isfinite(self._began_at) else min(times, default=0.0)
        seconds = np.maximum(0.0, times[kept] - began_at)
        return {"steps": steps[kept].tolist(), "tokens": tokens[kept].tolist(), "seconds": _round(seconds)}

    def marks(self, events: Sequence[Mapping[str, Any]] = ()) -> dict[str, list[int]]:
        """Return the steps of restarts, skipped steps and checkpoints, and of events that name a step, by kind."""
        found = {kind: list(steps) for kind, steps in self._marks.items()}
        for event in events:
            step = event.get("to_step", event.get("step"))
            if event["event"] in _EVENT_MARKS and isinstance(step, int):
                found.setdefault(event["event"], []).append(step)
        return {kind: sorted(steps)[:: math.ceil(len(steps) / MAX_MARKS)] for kind, steps in found.items()}

    def draw(self, series: Series) -> Iterator[Curve]:
        """Yield the curve of a series, one for each value of its label, or a faint curve and its moving mean.

        Steps without a finite value are left out.
        """
        for number, label in enumerate(sorted(self._columns[series.metric])[:MAX_LABELS]):
            steps, values = self._column(series.metric, label)
            if series.metric == "gradient_seconds_spread" and not values.any():  # a single worker has no spread
                continue
            name, color = label or series.name, series.color + number
            half = len(values) // SMOOTH_WINDOWS // 2
            if series.is_smooth and half:
                yield Curve(f"{name}, each step", *_thin(steps, values), color, is_faint=True)
                means = _moving_mean(values, half)
                yield Curve(f"{name}, mean of {2 * half + 1:,} steps", *_thin(steps, means), color)
                continue
            is_sparse = len(steps) < min(MAX_DOTS, self.num_steps) or series.metric.startswith("evaluation.")
            shown_steps, shown_values = _thin(steps, values)
            errors = dict(zip(*(each.tolist() for each in self._column(series.errors)), strict=True))
            yield Curve(
                name,
                shown_steps,
                shown_values,
                color,
                has_dots=is_sparse or len(steps) == 1,
                errors=[errors.get(step, 0.0) for step in shown_steps] if errors else None,
            )

    def _add(self, metric: str, label: str, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            steps, values = self._columns[metric].setdefault(label, (array("q"), array("d")))
            steps.append(step)
            values.append(value)

    def _column(self, metric: str, label: str = "") -> tuple[Integers, Floats]:
        """Return the steps of a metric's values in order, and the values."""
        steps, values = self._columns[metric].get(label, (array("q"), array("d")))
        order = np.argsort(steps, kind="stable")
        return np.array(steps)[order], np.array(values)[order]


def _thin(steps: Integers, values: Floats) -> tuple[list[int], list[float]]:
    """Keep the ends, and the smallest and the largest value of each range of steps; all of at most MAX_POINTS."""
    if len(steps) > MAX_POINTS:
        ranges = (steps - steps[0]) * (MAX_POINTS // 2 - 1) // (steps[-1] + 1 - steps[0])
        order = np.lexsort((values, ranges))  # by value within each range
        starts = np.flatnonzero(np.diff(ranges, prepend=-1))
        ends = np.append(starts[1:], len(steps)) - 1
        kept = np.unique(np.concatenate([[0, len(steps) - 1], order[starts], order[ends]]))
        steps, values = steps[kept], values[kept]
    return steps.tolist(), _round(values)


def _moving_mean(values: Floats, half: int) -> Floats:
    """Return the mean of each value and the `half` values before and after it; both ends have fewer."""
    totals = np.concatenate([[0.0], np.cumsum(values)])
    middles = np.arange(len(values))
    lows, highs = np.maximum(0, middles - half), np.minimum(len(values), middles + half + 1)
    return (totals[highs] - totals[lows]) / (highs - lows)


def _round(values: Floats) -> list[float]:
    """Six significant digits are more than a screen shows, and a third of the page's size."""
    return [float(f"{value:.6g}") for value in values]
