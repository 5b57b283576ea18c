"""The curves of a page are those of the records, keep their spikes, and have a bounded number of points."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from services.trainer.metrics.records import METRICS_FILE
from services.trainer.report.comparison import write_comparison
from services.trainer.report.curves import CHARTS, MAX_LABELS, MAX_MARKS, MAX_POINTS, RunCurves, Series
from services.trainer.tests.drawn import read_curves
from services.trainer.tests.metric_lines import STEP, make_steps

LOSS, SMOOTH_LOSS = Series("loss", "training"), Series("loss", "training", is_smooth=True)


def collect(losses: list[float]) -> RunCurves:
    curves = RunCurves()
    for step in reversed(range(len(losses))):
        curves.add({**STEP, "step": step, "loss": losses[step]})
    return curves


@pytest.mark.parametrize("num_steps", [1, MAX_POINTS + 1, 10_000])
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


def test_the_page_does_not_grow_with_the_steps() -> None:
    sizes = []
    for num_steps in (6_000, 12_000):
        curves = RunCurves()
        for record in make_steps(num_steps, every=5):
            groups = {f"group {number:03}": 1.0 for number in range(2 * MAX_LABELS)} if record["step"] < 50 else {}
            curves.add(record | {"update_ratio_by_group": groups})
        drawn = {name: [each for series in chart for each in curves.draw(series)] for name, chart in CHARTS.items()}
        assert len(drawn["update-by-group"]) == MAX_LABELS
        assert len(curves.positions()["steps"]) <= MAX_POINTS
        assert max(len(steps) for steps in curves.marks().values()) <= MAX_MARKS
        sizes.append(len(str(drawn)))
    assert sizes[1] < 1.1 * sizes[0] < 600_000


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
    assert "<b>" not in page.replace("second &lt;b&gt;", "").partition("<script")[0]
    curves = read_curves(page)
    for run, values in losses.items():
        assert curves["loss", run] == list(enumerate(values, 1))
    assert {chart for chart, _ in curves} == {"loss", "gradient-norm", "learning-rate", "throughput", "goodput"}
