"""Collects the curves, marks and positions of a run from the records of its steps, in memory that does not grow."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.trainer.metrics.metric_table import METRICS
from services.trainer.report.chart import Curve, Mark, Position, Positions
from services.trainer.report.envelope import NUM_BUCKETS, Envelope

LOSS_BUCKETS = 2_048
"""Most buckets of the loss, whose chart is as wide as the page. A curve has two points a bucket, and both ends."""
MOST_LABELS = 64
"""Curves of a metric at most: one for each value of its label, such as a source."""
MOST_DOTS = 100
"""Points of a curve that get dots: more would be a thick line."""
SMOOTH_WINDOWS = 40
"""A moving mean is taken over 1 / SMOOTH_WINDOWS of the run."""
MOST_MARKS = 4_096
"""Marks of one kind that are kept at most: those of the newest steps."""

_WITHOUT_FIRST_STEPS = frozenset(
    {"step_seconds", "tokens_per_second", "data_seconds", "data_share", "gradient_seconds_spread"}
)
"""Metrics that the first step of a process distorts, because it loads or compiles the graphs."""
_POSITIONS = 1_024


class RunCurves:
    """Curves of a run. `add` takes the record of each step, in any order."""

    def __init__(self, evaluations: Sequence[Mapping[str, Any]] = ()) -> None:
        self._evaluations = evaluations
        self._envelopes: dict[str, dict[str | None, Envelope]] = {metric.name: {} for metric in METRICS}
        self._marks: dict[str, list[int]] = defaultdict(list)
        self._table = _PositionTable()
        self._begin: float | None = None
        self.num_steps = 0
        """Number of records that were added."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of a step."""
        step = record["step"]
        self.num_steps += 1
        is_first = record["is_first_of_process"]
        for name, envelopes in self._envelopes.items():
            if name not in record or (is_first and name in _WITHOUT_FIRST_STEPS):
                continue
            value = record[name]
            for label, number in value.items() if isinstance(value, dict) else [(None, value)]:
                if label not in envelopes and len(envelopes) < MOST_LABELS:
                    envelopes[label] = Envelope(LOSS_BUCKETS if name == "loss" else NUM_BUCKETS)
                if label in envelopes:
                    envelopes[label].add(step, number)
        self._table.add(step, record.get("tokens", 0), record["time"])
        if begin := record.get("run_started_at"):
            self._begin = begin if self._begin is None else min(begin, self._begin)
        for kind, has_happened in (
            ("restart", is_first and record.get("restarts", 0) > 0),
            ("skipped", not math.isfinite(record["gradient_norm"])),
            ("checkpoint", "checkpoint_stall_seconds" in record),
        ):
            if has_happened and len(self._marks[kind]) < MOST_MARKS:
                self._marks[kind].append(step)

    @property
    def positions(self) -> Positions:
        """Tokens and time of the run's steps."""
        known = self._table.rows()
        begin = self._begin if self._begin is not None else min((row[2] for row in known), default=0.0)
        return Positions([Position(step, tokens, max(0.0, time - begin)) for step, tokens, time in known])

    def marks(self, events: Sequence[Mapping[str, Any]]) -> list[Mark]:
        """Return the marks of the recorded steps, and of those events of the run that name a step."""
        found = [Mark(kind, step) for kind, steps in self._marks.items() for step in steps]
        for event in events:
            kind, step = _EVENT_MARKS.get(event["event"]), event.get("to_step", event.get("step"))
            if kind and isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= 2**53:
                found.append(Mark(kind, step))
        return found

    def curve(self, metric: str, name: str, positions: Positions, color: int = 0) -> Iterator[Curve]:
        """Yield the curve of a metric, or one for each value of its label; none if no record has the metric."""
        for number, (label, envelope) in enumerate(sorted(self._envelopes[metric].items(), key=_by_label)):
            points = envelope.points()
            if points:
                shown = name if label is None else label
                has_dots = len(points) <= min(MOST_DOTS, max(40, self.num_steps // 20)) and len(points) < self.num_steps
                yield Curve(shown, points, positions, color + number, has_dots=has_dots)

    def smoothed(self, metric: str, name: str, positions: Positions, color: int = 0) -> Iterator[Curve]:
        """Yield the curve of a metric, pale, and its moving mean; only the curve if it is short."""
        for label, envelope in self._envelopes[metric].items():
            points, window = envelope.points(), envelope.window_steps(SMOOTH_WINDOWS)
            if label is not None or not points:
                continue
            if len(points) < SMOOTH_WINDOWS or window < 2:
                yield Curve(name, points, positions, color)
                continue
            yield Curve(f"{name}, each step", points, positions, color, is_faint=True, is_named=False)
            yield Curve(f"{name}, mean of {window:,} steps", envelope.means(SMOOTH_WINDOWS), positions, color)

    def evaluation(
        self, field: str, name: str, positions: Positions, color: int, *, with_errors: bool = False
    ) -> Iterator[Curve]:
        """Yield the curve of a number of the evaluations, which a run of any length has few of."""
        known = [each for each in self._evaluations if each.get(field) is not None]
        yield from _evaluation_curve(known, known, field, name, positions, color, with_errors=with_errors)

    def evaluation_by_source(self, field: str, positions: Positions) -> Iterator[Curve]:
        """Yield the curve of each source of the evaluations; none for a single source, which is the whole."""
        labels = list(dict.fromkeys(label for each in self._evaluations for label in each["sources"]))
        for number, label in enumerate(labels[:MOST_LABELS] if len(labels) > 1 else ()):
            known = [each for each in self._evaluations if each["sources"].get(label, {}).get(field) is not None]
            numbers = [each["sources"][label] for each in known]
            yield from _evaluation_curve(known, numbers, field, label, positions, number, with_errors=False)


_EVENT_MARKS = {"rollback": "rollback", "straggler": "straggler"}
"""Kinds of marks by the kinds of events that name a step."""


def _by_label(item: tuple[str | None, Envelope]) -> str:
    return item[0] or ""


def _evaluation_curve(
    evaluations: Sequence[Mapping[str, Any]],
    numbers: Sequence[Mapping[str, Any]],
    field: str,
    name: str,
    positions: Positions,
    color: int,
    *,
    with_errors: bool,
) -> Iterator[Curve]:
    """Yield the curve of a field of `numbers`, one for each evaluation."""
    envelope, errors = Envelope(), dict[int, float]()
    for evaluation, each in zip(evaluations, numbers, strict=True):
        envelope.add(evaluation["step"], each[field])
        errors[evaluation["step"]] = each.get("standard_error") or 0.0
    points = envelope.points()
    if points:
        bars = [errors[point.step] for point in points] if with_errors else []
        yield Curve(name, points, positions, color, has_dots=True, errors=bars)


class _PositionTable:
    """Keeps the tokens and the time after steps: after all steps of a short run, and after some of a long one."""

    def __init__(self) -> None:
        self._width = 1
        self._rows: dict[int, tuple[int, float, float]] = {}
        self._ends: list[tuple[int, float, float]] = []

    def add(self, step: int, tokens: float, time: float) -> None:
        row = (step, tokens, time)
        self._ends = [min(*self._ends, row), max(*self._ends, row)] if self._ends else [row, row]
        self._rows.setdefault(step // self._width, row)
        while len(self._rows) > _POSITIONS:
            self._width *= 2
            kept: dict[int, tuple[int, float, float]] = {}
            for number, each in self._rows.items():
                kept.setdefault(number // 2, each)
            self._rows = kept

    def rows(self) -> list[tuple[int, float, float]]:
        return sorted({*self._rows.values(), *self._ends})
