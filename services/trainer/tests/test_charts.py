"""A chart keeps the minima and maxima of a curve of any length, and draws the same numbers for all choices of axes."""

from __future__ import annotations

import html
import itertools
import json
import math
import random
import re
import tracemalloc
from pathlib import Path

import pytest

from services.common.process.duration import write_duration
from services.common.recipe.schema import Recipe
from services.trainer.metrics.records import BLOCK_BYTES, METRICS_FILE, StepsNewestFirst
from services.trainer.report.axis import find_ticks, fit_scale, write_bytes, write_number, write_share
from services.trainer.report.chart import (
    HEIGHT,
    NATS_PER_TOKEN,
    WIDTH,
    X_AXES,
    Y_AXES,
    Chart,
    Curve,
    Mark,
    Position,
    Positions,
    draw_axis_choice,
    draw_chart,
)
from services.trainer.report.envelope import Envelope, Point
from services.trainer.report.run_charts import make_charts
from services.trainer.report.run_curves import RunCurves
from services.trainer.tests.builders import make_recipe
from services.trainer.tests.drawn import read_curves
from services.trainer.tests.test_report_page import make_steps

STRAIGHT = Positions([Position(0, 0, 0.0), Position(100, 51_200, 400.0)])


@pytest.mark.parametrize("num_steps", [1, 7, 100, 10_000])
@pytest.mark.parametrize("is_backward", [False, True])
def test_an_envelope_keeps_few_points_and_all_extremes(num_steps: int, is_backward: bool) -> None:
    source, envelope = random.Random(num_steps), Envelope(64)
    values = [source.gauss(3.0, 1.0) for _ in range(num_steps)]
    steps = range(num_steps)
    for step in reversed(steps) if is_backward else steps:
        envelope.add(step, values[step])

    points = envelope.points()

    assert len(points) <= 2 * 64 + 2
    assert points == sorted(points)
    assert all(values[step] == value for step, value in points)
    assert {points[0].step, points[-1].step} == {0, num_steps - 1}
    kept = [value for _, value in points]
    assert (min(kept), max(kept)) == (min(values), max(values))
    if num_steps > 100:  # every stretch of the curve keeps its own extremes, too
        begin, end = num_steps // 2, num_steps // 2 + num_steps // 4
        assert max(value for step, value in points if begin <= step < end) >= max(values[begin + 256 : end - 256])
    else:
        assert points == [Point(step, value) for step, value in enumerate(values)] or num_steps > 64


def test_a_moving_mean_of_a_line_is_the_line_and_infinite_values_are_gaps() -> None:
    envelope = Envelope(128)
    for step in range(1_000):
        envelope.add(step, 2.0 * step)
    for value in (math.nan, math.inf, -math.inf):
        envelope.add(500, value)
    inner = envelope.means(20)[10:-10]
    assert all(value == pytest.approx(2.0 * step, abs=2 * envelope.window_steps(20) / 8) for step, value in inner)
    assert Envelope().points() == Envelope().means(5) == []


@pytest.mark.parametrize(
    ("values", "is_logarithmic", "texts"),
    [
        ([3.3, 8.4], False, ["4", "6", "8"]),
        ([0.0, 0.004], False, ["0", "0.001", "0.002", "0.003", "0.004"]),
        ([0.02, 3_000.0], True, ["0.1", "1", "10", "100", "1,000"]),
        ([5.0, 5.0], False, ["4.5", "5.0", "5.5"]),
        ([0, 983_040], False, ["0", "200k", "400k", "600k", "800k", "1M"]),
        ([], False, ["0.90", "0.95", "1.00", "1.05", "1.10"]),
    ],
)
def test_ticks_are_round_numbers_within_the_scale(values: list[float], is_logarithmic: bool, texts: list[str]) -> None:
    scale = fit_scale(values, is_logarithmic=is_logarithmic)
    ticks = find_ticks(scale, 5, write_number)
    assert [tick.text for tick in ticks] == texts
    assert all(-1e-9 <= tick.place <= 1 + 1e-9 for tick in ticks)
    assert all(0 <= scale.place(value) <= 1 for value in values)


@pytest.mark.parametrize("values", [[1e-300, 1e-299], [1e100, -1e100], [0.0, 0.0], [1e99, 1.0], [5e-324, 1e99], [-1.0]])
@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_no_range_of_values_fails_a_scale_or_makes_many_ticks(values: list[float], is_logarithmic: bool) -> None:
    for begins_at_zero in (False, True):
        scale = fit_scale(values, is_logarithmic=is_logarithmic, begins_at_zero=begins_at_zero)
        assert len(find_ticks(scale, 5, write_number)) < 20
        assert all(0 <= scale.place(value) <= 1 for value in values)


def test_numbers_are_short_texts() -> None:
    written = {1_500_000: "1.5M", 20_000: "20k", 1_500: "1,500", 0.25: "0.25", 4e-4: "4e-4", 0: "0", -2.5: "-2.5"}
    assert {value: write_number(value) for value in written} == written
    assert (write_share(0.9131), write_share(1.0), write_share(0.0025)) == ("91.3%", "100%", "0.25%")
    assert (write_bytes(713_678_848), write_bytes(12)) == ("714 MB", "12 B")
    assert [write_duration(seconds) for seconds in (0, 0.35, 125, 7_200, 273_600)] == [
        *("0 s", "0.35 s", "2 min 5 s", "2 h", "3 d 4 h"),
    ]


def test_a_chart_draws_its_curves_for_every_choice_of_axes() -> None:
    points = [Point(step, 8.0 / step) for step in range(1, 101)]
    chart = Chart(
        "loss",
        "Loss <of> a run",
        NATS_PER_TOKEN,
        "Healthy: it falls.",
        [Curve("train & more", points, STRAIGHT)],
        marks=[Mark("restart", 50)],
        positions=STRAIGHT,
        may_be_logarithmic=True,
    )

    drawn = draw_chart(chart)

    expected = {"step": 1, "log": 1, "tokens": 512, "time": 4 / 60}  # of 400 s
    assert len(re.findall("<svg", drawn)) == len(X_AXES) * len(Y_AXES)
    for curve in read_curves(drawn):
        assert curve.name == "train & more"
        assert len(curve.points) == len(points)
        for (x, y), point in zip(curve.points, points, strict=True):
            assert x == pytest.approx(point.step * expected[curve.x_axis], rel=0.01, abs=curve.x_resolution)
            assert y == pytest.approx(point.value, rel=0.01, abs=curve.y_resolution)
    assert html.escape(chart.title) in drawn
    assert chart.title not in drawn
    assert drawn.count('class="mark restart"') == len(X_AXES) * len(Y_AXES)
    restart = re.search(rf'class="mark restart" d="M(\d+) {HEIGHT}v-{HEIGHT}"', drawn)
    assert restart
    assert int(restart[1]) == pytest.approx(WIDTH * 50 / 100, abs=1)
    for group, axes in (("x", X_AXES), ("y", Y_AXES)):
        assert [f'id="{group}-{name}"' in draw_axis_choice() for name in axes] == [True] * len(axes)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return make_recipe(tmp_path_factory.mktemp("recipe"))


def test_the_page_does_not_grow_with_the_steps(recipe: Recipe) -> None:
    sizes = []
    for num_steps in (3_000, 6_000):
        curves = RunCurves()
        for record in make_steps(num_steps, every=num_steps // 50):
            curves.add(record)
        charts = [chart for section in make_charts(curves, recipe, []) for chart in section.charts]
        points = [len(curve.points) for chart in charts for curve in chart.curves]
        assert max(points) <= 5_000
        sizes.append(sum(map(len, map(draw_chart, charts))))
    assert sizes[1] < 1.1 * sizes[0] < 1_000_000


def test_records_are_read_without_being_held(tmp_path: Path) -> None:
    with (tmp_path / METRICS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in make_steps(8_000))
    tracemalloc.start()
    steps = [record["step"] for record in itertools.islice(StepsNewestFirst(tmp_path), 3_000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == list(range(8_000, 5_000, -1))
    assert peak < 4.5 * BLOCK_BYTES < (tmp_path / METRICS_FILE).stat().st_size


def test_a_chart_without_a_value_is_left_out() -> None:
    assert draw_chart(Chart("loss", "Loss", NATS_PER_TOKEN, "", [Curve("none", [], STRAIGHT)])) == ""
