"""Writes comparison.html, one page that lays the curves of several runs over one another.

The page has the newest numbers of the runs, the recipe values in which they differ, and the charts with which runs are
compared. Its size grows with the runs, and not with their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import run_folder
from services.trainer.metrics.records import StepsNewestFirst
from services.trainer.report.charts import REPORT, VALIDATION_LOSS, Chart
from services.trainer.report.curves import DrawnChart, RunCurves
from services.trainer.report.page import Table, render

COMPARISON_FILE = "comparison.html"


def write_comparison(
    root: Path, runs: Sequence[str], numbers: Sequence[Sequence[str]], values: Sequence[Sequence[str]]
) -> Path:
    """Write the page into the folder of all runs, and return its path.

    `numbers` is the table of the runs' newest numbers and `values` that of the recipe values that differ, each with its
    row of headings.
    """
    curves = {run: _read_curves(root, run) for run in runs}
    charts = [drawn for chart in _choose_charts() if (drawn := _draw(chart, curves)).curves]
    page = render(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        subtitle=f"Millrace runs, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        numbers=Table("Newest numbers", numbers[0], numbers[1:]),
        values=Table("Recipe values that differ", values[0], values[1:]),
        data={"runs": [each.positions() for each in curves.values()], "marks": {}, "charts": charts},
    )
    path = run_folder(root, COMPARISON_FILE)
    write_durably(path, page.encode())
    return path


def _read_curves(root: Path, run: str) -> RunCurves:
    folder = run_folder(root, run)
    curves = RunCurves(read_evaluations(folder).lines)
    for record in StepsNewestFirst(folder):
        curves.add(record)
    return curves


def _choose_charts() -> Iterator[Chart]:
    for chart in (chart for section in REPORT for chart in section.charts if chart.compared):
        yield replace(chart, advice=chart.compared, series=chart.series[:1], marks=())
        if chart.id == "loss":
            yield VALIDATION_LOSS


def _draw(chart: Chart, runs: dict[str, RunCurves]) -> DrawnChart:
    """Draw the moving means alone: the pale curves of several runs would hide one another."""
    found = [
        replace(curve, name=name, color=number, run=number)
        for number, (name, curves) in enumerate(runs.items())
        for series in chart.series
        for curve in curves.draw(series)
        if not curve.is_faint
    ]
    return DrawnChart(chart, found)
