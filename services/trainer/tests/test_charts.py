"""The curves of a page are those of the records, keep their spikes, and have a bounded number of points."""

from __future__ import annotations

import itertools
import json
import math
import random
import tracemalloc
from pathlib import Path

import pytest

from services.common.process.progress import write_duration
from services.trainer.metrics.records import BLOCK_BYTES, METRICS_FILE, StepsNewestFirst
from services.trainer.report.charts import REPORT, Series
from services.trainer.report.comparison import write_comparison
from services.trainer.report.curves import MAX_DOTS, MAX_LABELS, MAX_MARKS, MAX_POINTS, RunCurves
from services.trainer.report.page import write_bytes, write_number, write_share
from services.trainer.tests.drawn import read_curves
from services.trainer.tests.metric_lines import STEP
from services.trainer.tests.test_report_page import make_steps

LOSS, SMOOTH_LOSS = Series("loss", "training"), Series("loss", "training", is_smooth=True)


def collect(losses: list[float]) -> RunCurves:
    curves = RunCurves()
    for step in reversed(range(len(losses))):
        curves.add({**STEP, "step": step, "loss": losses[step]})
    return curves


@pytest.mark.parametrize("num_steps", [1, 7, MAX_POINTS, MAX_POINTS + 1, 10_000])
def test_a_curve_keeps_few_points_and_all_extremes(num_steps: int) -> None:
    source = random.Random(num_steps)
    losses = [round(source.gauss(3.0, 1.0), 4) for _ in range(num_steps)]

    [curve] = collect(losses).draw(LOSS)

    assert len(curve.steps) <= MAX_POINTS
    assert curve.steps == sorted(set(curve.steps))
    assert curve.values == [losses[step] for step in curve.steps]
    assert (curve.steps[0], curve.steps[-1]) == (0, num_steps - 1)
    for start in range(0, num_steps, 100):  # a spike anywhere is kept
        spike = max(range(start, min(start + 100, num_steps)), key=losses.__getitem__)
        kept = [value for step, value in zip(curve.steps, curve.values, strict=True) if abs(step - spike) <= 40]
        assert max(kept) >= losses[spike]
    assert (min(curve.values), max(curve.values)) == (min(losses), max(losses))


def test_a_moving_mean_of_a_line_is_the_line_and_non_finite_values_are_left_out() -> None:
    losses = [2.0 * step for step in range(1_000)]
    faint, mean = collect(losses).draw(SMOOTH_LOSS)
    assert (faint.is_faint, mean.is_faint) == (True, False)
    assert mean.name == "training, mean of 25 steps"
    assert mean.values[20:-20] == pytest.approx(losses[20:-20])

    [curve] = collect([1.0, math.nan, math.inf, 2.0]).draw(SMOOTH_LOSS)
    assert (curve.steps, curve.values) == ([0, 3], [1.0, 2.0])
    assert list(RunCurves().draw(LOSS)) == []


def test_labels_marks_and_dots_are_bounded() -> None:
    curves = RunCurves()
    groups = {f"group {number:03}": 1.0 for number in range(2 * MAX_LABELS)}
    for step in range(10 * MAX_MARKS):
        curves.add({**STEP, "step": step, "gradient_norm_by_group": groups, "checkpoint_stall_seconds": 0.1})
    assert len(list(curves.draw(Series("gradient_norm_by_group")))) == MAX_LABELS
    assert len(curves.marks()["checkpoint"]) == MAX_MARKS
    assert not any(curve.has_dots for curve in curves.draw(LOSS))
    [single] = collect([1.0]).draw(LOSS)
    assert single.has_dots
    assert MAX_DOTS < MAX_POINTS


def test_the_page_does_not_grow_with_the_steps() -> None:
    sizes = []
    for num_steps in (3_000, 6_000):
        curves = RunCurves()
        for record in make_steps(num_steps, every=num_steps // 50):
            curves.add(record)
        drawn = [
            curve
            for section in REPORT
            for chart in section.charts
            for each in chart.series
            for curve in curves.draw(each)
        ]
        assert max(len(curve.steps) for curve in drawn) <= MAX_POINTS
        assert len(curves.positions()["steps"]) <= MAX_POINTS
        sizes.append(sum(len(str(curve)) for curve in drawn))
    assert sizes[1] < 1.1 * sizes[0] < 600_000


def test_numbers_are_short_texts() -> None:
    written = {1_500_000: "1.5M", 20_000: "20k", 1_500: "1,500", 0.25: "0.25", 0: "0"}
    assert {value: write_number(value) for value in written} == written
    assert (write_share(0.9131), write_share(1.0)) == ("91.3%", "100.0%")
    assert (write_bytes(713_678_848), write_bytes(12)) == ("714 MB", "12 B")
    assert [write_duration(seconds) for seconds in (0, 0.35, 125, 7_200, 273_600)] == [
        *("0 s", "0.35 s", "2 min 5 s", "2 h", "3 d 4 h"),
    ]


def test_a_comparison_lays_the_curves_of_runs_over_one_another(tmp_path: Path) -> None:
    losses = {"first": [5.0, 4.0, 3.0], "second <b>": [6.0, 5.5]}
    for run, values in losses.items():
        folder = tmp_path / "run" / run
        folder.mkdir(parents=True)
        records = [{**STEP, "step": step, "loss": loss} for step, loss in enumerate(values, 1)]
        (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in records))

    path = write_comparison(tmp_path, list(losses), [("run",), ("first",)], [("recipe value", *losses)])

    assert path == tmp_path / "run/comparison.html"
    page = path.read_text(encoding="utf-8")
    assert "The recipes are identical." in page
    assert "<b>" not in page.replace("second &lt;b&gt;", "").partition("<script")[0]
    curves = read_curves(page)
    for run, values in losses.items():
        assert curves["loss", run] == list(enumerate(values, 1))
    assert {chart for chart, _ in curves} == {"loss", "gradient-norm", "learning-rate", "throughput", "goodput"}


def test_records_are_read_without_being_held(tmp_path: Path) -> None:
    with (tmp_path / METRICS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in make_steps(8_000))
    tracemalloc.start()
    steps = [record["step"] for record in itertools.islice(StepsNewestFirst(tmp_path), 3_000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert steps == list(range(8_000, 5_000, -1))
    assert peak < 4.5 * BLOCK_BYTES < (tmp_path / METRICS_FILE).stat().st_size
