"""Draws a chart as HTML and SVG that need no script: curves over the steps of a run, or of several runs.

`draw_chart` returns a `<figure>`. Its texts are HTML, so that they keep their size at any width of the page, can be
selected, and follow the page's colours; only lines are SVG. A chart is drawn once for each choice of its axes, such as
tokens and a logarithmic scale, and the page's style shows the one that the reader has chosen with the buttons of
`draw_axis_choice`. Colours are those of `page_style`.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.trainer.report.axis import (
    Scale,
    Tick,
    Write,
    find_ticks,
    fit_scale,
    write_bytes,
    write_number,
    write_share,
)
from services.trainer.report.envelope import Point

WIDTH, HEIGHT = 2_000, 1_000
"""Size of a drawing in its own units. The page stretches it to the width of its column."""
NUM_COLORS = 8
"""Colours of curves that the page's style has."""
MOST_MARKS = 150
"""Marks of one kind that are drawn at most: more would be a solid line."""
_X_TICKS, _Y_TICKS = 5, 5

X_AXES = {"step": "steps", "log": "steps, logarithmic", "tokens": "tokens", "time": "time"}
"""The choices of the horizontal axis by the name that the page's style knows, and their labels."""
Y_AXES = {"linear": "linear", "logarithmic": "logarithmic"}
"""The choices of the vertical axis by the name that the page's style knows, and their labels."""


class Unit(NamedTuple):
    """The unit of a chart's values."""

    name: str
    write: Write = write_number


NATS_PER_TOKEN = Unit("nats per token")
BITS_PER_BYTE = Unit("bits per byte")
TOKENS_PER_SECOND = Unit("tokens per second")
SHARE = Unit("share", write_share)
SECONDS = Unit("seconds")
BYTES = Unit("bytes", write_bytes)
RATIO = Unit("ratio")
L2_NORM = Unit("L2 norm")
NO_UNIT = Unit("no unit")


class Position(NamedTuple):
    """Tokens that a run has trained on after a step, and the seconds since it began."""

    step: int
    tokens: float
    seconds: float


class Positions:
    """Finds the tokens and the time of any step of a run, by interpolation between known positions."""

    def __init__(self, known: Sequence[Position]) -> None:
        self._is_known = bool(known)
        self._known = sorted(known) or [Position(0, 0.0, 0.0)]
        self._steps = [position.step for position in self._known]

    @property
    def ends(self) -> tuple[int, ...]:
        """The first and the last known step, between which all charts of a run are drawn; empty if none is known."""
        return (self._steps[0], self._steps[-1]) if self._is_known else ()

    def find(self, step: int) -> Position:
        """Return the position of a step; that of the nearest known step where it is before or after all of them."""
        after = bisect_right(self._steps, step)
        if after == 0 or after == len(self._known):
            return self._known[max(0, after - 1)]._replace(step=step)
        left, right = self._known[after - 1], self._known[after]
        share = (step - left.step) / (right.step - left.step)
        return Position(
            step,
            left.tokens + share * (right.tokens - left.tokens),
            left.seconds + share * (right.seconds - left.seconds),
        )


@dataclass(frozen=True)
class Curve:
    """The values of one metric of one run."""

    name: str
    points: Sequence[Point]
    positions: Positions
    color: int = 0
    """Number of the colour, from 0 to NUM_COLORS - 1; larger numbers begin again."""
    is_faint: bool = False
    """Whether the curve is drawn thin and pale, as the background of its moving mean."""
    has_dots: bool = False
    """Whether each point has a dot, because there are few of them."""
    errors: Sequence[float] = ()
    """Half the length of each point's error bar; empty if the curve has none."""
    is_named: bool = True
    """Whether the legend names the curve and its last value."""


class Mark(NamedTuple):
    """Something that happened after a step, for all charts of a run."""

    kind: str
    """Name of the kind, such as `restart`, which is also its class in the page's style."""
    step: int


@dataclass(frozen=True)
class Chart:
    """Everything that a reader sees of one chart."""

    identifier: str
    """Name of the chart in the page's address, such as `loss`."""
    title: str
    unit: Unit
    healthy: str
    """A sentence that says what a healthy run looks like here."""
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    positions: Positions = field(default_factory=lambda: Positions(()))
    """Positions of the marks."""
    reference: tuple[str, float] | None = None
    """Name and value of a horizontal line, such as a limit."""
    begins_at_zero: bool = False
    """Whether the linear scale contains 0."""
    may_be_logarithmic: bool = False
    """Whether the reader may choose a logarithmic vertical axis."""
    is_wide: bool = False
    """Whether the chart takes the whole width of the page."""


def draw_chart(chart: Chart) -> str:
    """Return the chart as an HTML `<figure>`, or an empty text if no curve has a point.

    The size grows with the points, which `Envelope` bounds, times the choices of axes.
    """
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return ""
    variants = "".join(
        _draw_variant(chart, curves, x_axis, y_axis)
        for y_axis in (Y_AXES if chart.may_be_logarithmic else ["linear"])
        for x_axis in X_AXES
    )
    title, classes = html.escape(chart.title), "chart wide" if chart.is_wide else "chart"
    return (
        f'<figure class="{classes}" id="{chart.identifier}" aria-labelledby="{chart.identifier}-title">'
        f'<figcaption><h3 id="{chart.identifier}-title">{title} <small>{html.escape(chart.unit.name)}</small></h3>'
        f"<p>{html.escape(chart.healthy)}</p>{_draw_legend(chart, curves)}</figcaption>{variants}</figure>"
    )


def draw_axis_choice() -> str:
    """Return the buttons with which a reader chooses the axes of all charts of the page."""
    groups = (("x", "Horizontal axis", X_AXES), ("y", "Vertical axis", Y_AXES))
    return (
        '<form class="choice" aria-label="Axes of the charts">'
        + "".join(
            f"<fieldset><legend>{legend}</legend>"
            + "".join(
                f'<label><input type="radio" name="{group}" id="{group}-{name}"{" checked" if number == 0 else ""}>'
                f"<span>{label}</span></label>"
                for number, (name, label) in enumerate(axes.items())
            )
            + "</fieldset>"
            for group, legend, axes in groups
        )
        + "</form>"
    )


def color_class(number: int) -> str:
    """Return the class of a curve's colour in the page's style."""
    return f"c{number % NUM_COLORS}"


def _draw_legend(chart: Chart, curves: Sequence[Curve]) -> str:
    items = [
        f'<li class="{color_class(curve.color)}"><i class="{"dot" if curve.has_dots else "line"}"></i>'
        f"{html.escape(curve.name)} <b>{html.escape(chart.unit.write(curve.points[-1].value, None))}</b></li>"
        for curve in curves
        if curve.is_named
    ]
    if chart.reference:
        name, value = chart.reference
        items.append(
            f'<li class="reference"><i class="line"></i>{html.escape(name)} '
            f"<b>{html.escape(chart.unit.write(value, None))}</b></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _draw_variant(chart: Chart, curves: Sequence[Curve], x_axis: str, y_axis: str) -> str:
    """Draw the chart with one choice of axes."""
    across = _HorizontalAxis(curves, x_axis)
    down = _fit_vertical(chart, curves, is_logarithmic=y_axis == "logarithmic")
    x_ticks = find_ticks(across.scale, _X_TICKS, write_number)
    y_ticks = find_ticks(down, _Y_TICKS, chart.unit.write)
    y_class = f"y-{y_axis}" if chart.may_be_logarithmic else "y-linear y-logarithmic"
    lines = [
        f'<path class="grid" d="{"".join(f"M0 {_down(tick.place)}h{WIDTH}" for tick in y_ticks)}"/>',
        *_draw_marks(chart, across),
        *(text for curve in curves for text in _draw_curve(curve, across, down)),
    ]
    if chart.reference and down.low <= chart.reference[1] <= down.high:
        lines.append(f'<path class="reference" d="M0 {_down(down.place(chart.reference[1]))}h{WIDTH}"/>')
    described = f"{chart.title} over {across.label}"
    data = f'data-x="{across.scale.low:g} {across.scale.high:g} {int(across.scale.is_logarithmic)}"'
    data += f' data-y="{down.low:.6g} {down.high:.6g} {int(down.is_logarithmic)}"'
    return (
        f'<div class="plot variant x-{x_axis} {y_class}" {data}>'
        f'<div class="ticks down" aria-hidden="true">{_draw_ticks(y_ticks, "bottom")}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(described)}">{"".join(lines)}</svg>'
        f'<div class="ticks across" aria-hidden="true">{_draw_ticks(x_ticks, "left")}</div>'
        f'<p class="axis">{html.escape(across.label)}</p></div>'
    )


def _draw_ticks(ticks: Sequence[Tick], side: str) -> str:
    return "".join(f'<span style="{side}:{100 * tick.place:.4g}%">{html.escape(tick.text)}</span>' for tick in ticks)


def _fit_vertical(chart: Chart, curves: Sequence[Curve], *, is_logarithmic: bool) -> Scale:
    values = [point.value for curve in curves for point in curve.points]
    if chart.reference:
        limit = chart.reference[1]
        if limit <= 2 * max(values):  # a limit far above the values would flatten them
            values.append(limit)
    return fit_scale(values, is_logarithmic=is_logarithmic, begins_at_zero=chart.begins_at_zero)


_TIMES = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3_600.0, 3_600.0, "hours"), (120.0, 60.0, "minutes"))


class _HorizontalAxis:
    """Places steps on the horizontal axis of a variant."""

    def __init__(self, curves: Sequence[Curve], name: str) -> None:
        self._name, self._seconds = name, 1.0
        self.label = {"step": "step", "log": "step, logarithmic", "tokens": "tokens trained on"}.get(name, "")
        ends = [
            (curve, step)
            for curve in curves
            for step in (*curve.positions.ends, curve.points[0].step, curve.points[-1].step)
        ]
        if name == "time":
            longest = max(curve.positions.find(step).seconds for curve, step in ends)
            known = (each[1:] for each in _TIMES if longest >= each[0])
            self._seconds, unit = next(known, (1.0, "seconds"))
            self.label = f"{unit} since the run began"
        values = [self._value(curve.positions, step) for curve, step in ends]
        low, high = min(values), max(values)
        if name == "log":
            low = max(1.0, low)
        if high <= low:  # a single step
            high = low + max(1.0, low / 1_000)
        self.scale = Scale(low, high, is_logarithmic=name == "log")

    def place(self, positions: Positions, step: int) -> int:
        return round(WIDTH * self.scale.place(self._value(positions, step)))

    def _value(self, positions: Positions, step: int) -> float:
        if self._name in ("step", "log"):
            return step
        position = positions.find(step)
        return position.tokens if self._name == "tokens" else position.seconds / self._seconds


def _down(place: float) -> int:
    return round(HEIGHT * (1 - place))


def _draw_curve(curve: Curve, across: _HorizontalAxis, down: Scale) -> Iterator[str]:
    shown = [point for point in curve.points if point.value > 0 or not down.is_logarithmic]
    places = [(across.place(curve.positions, point.step), _down(down.place(point.value))) for point in shown]
    if not places:
        return
    color = color_class(curve.color)
    if curve.errors:
        bars = []
        for (x, _), point, error in zip(places, curve.points, curve.errors, strict=False):
            low, high = (_down(down.place(point.value + sign * error)) for sign in (-1, 1))
            bars.append(f"M{x} {low}V{high}")
        yield f'<path class="error {color}" d="{"".join(bars)}"/>'
    name = f"<title>{html.escape(curve.name)}</title>" if curve.is_named else ""
    data = f' data-name="{html.escape(curve.name)}"'
    classes = f"curve{' faint' if curve.is_faint else ''} {color}"
    yield f'<path class="{classes}"{data} d="{_write_path(places)}">{name}</path>'
    if curve.has_dots or len(places) == 1:
        yield f'<path class="dots {color}" d="{"".join(f"M{x} {y}h0" for x, y in places)}"/>'


def _write_path(places: Sequence[tuple[int, int]]) -> str:
    """Write a polyline with distances instead of places, which are shorter; they are whole, so none is rounded."""
    x, y = places[0]
    text = [f"M{x} {y}l"]
    for next_x, next_y in places[1:]:
        across, down = next_x - x, next_y - y
        text.append(f"{'' if text[-1].endswith('l') or across < 0 else ' '}{across}{'' if down < 0 else ' '}{down}")
        x, y = next_x, next_y
    return "".join(text) if len(text) > 1 else f"M{x} {y}"


_MARK_LENGTHS = {"checkpoint": 40, "skipped": 70}
"""Lengths of marks that begin at the horizontal axis; the others go over the whole height."""


def _draw_marks(chart: Chart, across: _HorizontalAxis) -> Iterator[str]:
    for kind in dict.fromkeys(mark.kind for mark in chart.marks):
        places = sorted({across.place(chart.positions, mark.step) for mark in chart.marks if mark.kind == kind})
        length = _MARK_LENGTHS.get(kind, HEIGHT)
        shown = places[:: math.ceil(len(places) / MOST_MARKS)]
        yield f'<path class="mark {kind}" d="{"".join(f"M{x} {HEIGHT}v-{length}" for x in shown)}"/>'
