"""Writes comparison.html, one page that lays the curves of several runs over one another.

The page has the newest numbers of the runs, the recipe values in which they differ, and the charts with which runs are
compared. Its size and the memory that it takes grow with the runs, and not with their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.manifest import write_durably
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import run_folder
from services.trainer.metrics.records import StepsNewestFirst
from services.trainer.report.chart import (
    NATS_PER_TOKEN,
    Chart,
    Curve,
    Positions,
    draw_axis_choice,
    draw_chart,
)
from services.trainer.report.page import make_grid, make_page, make_section, make_table
from services.trainer.report.run_curves import RunCurves
from services.trainer.report.shared_charts import (
    BITS_PER_BYTE_CHART,
    GOODPUT_CHART,
    GRADIENT_NORM_CHART,
    LEARNING_RATE_CHART,
    LOSS_CHART,
    MFU_CHART,
    THROUGHPUT_CHART,
)

COMPARISON_FILE = "comparison.html"


@dataclass(frozen=True)
class ComparedRun:
    """The curves of one run of a comparison."""

    run: str
    color: int
    curves: RunCurves
    positions: Positions

    def smoothed(self, metric: str) -> Iterator[Curve]:
        """Yield the moving mean of a metric alone: the pale curves of several runs would hide one another."""
        found = self.curves.smoothed(metric, self.run, self.positions, self.color)
        yield from (replace(curve, name=self.run) for curve in found if not curve.is_faint)

    def evaluation(self, field: str) -> Iterator[Curve]:
        yield from self.curves.evaluation(field, self.run, self.positions, self.color)


def write_comparison(
    root: Path, runs: Sequence[str], numbers: Sequence[Sequence[str]], values: Sequence[Sequence[str]]
) -> Path:
    """Write the page into the folder of all runs, and return its path.

    `numbers` is the table of the runs' newest numbers and `values` that of the recipe values that differ, each with its
    row of headings.
    """
    compared = [_read_curves(root, run, color) for color, run in enumerate(runs)]
    charts = make_grid(map(draw_chart, _make_charts(compared)))
    recipes = make_table("Recipe values that differ", values[0], values[1:]) or "<p>The recipes are identical.</p>"
    page = make_page(
        f"{len(runs)} runs compared",
        f"Millrace runs, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        [
            make_section("runs", "Where are they?", make_table("Newest numbers", numbers[0], numbers[1:])),
            make_section("recipes", "What differs?", recipes),
            make_section("curves", "How did they go?", draw_axis_choice() + charts if charts else ""),
        ],
    )
    path = run_folder(root, COMPARISON_FILE)
    write_durably(path, page.encode())
    return path


def _read_curves(root: Path, run: str, color: int) -> ComparedRun:
    """Read the records of a run, newest first, without keeping them."""
    folder = run_folder(root, run)
    curves = RunCurves(read_evaluations(folder).lines)
    for record in StepsNewestFirst(folder):
        curves.add(record)
    return ComparedRun(run, color, curves, curves.positions)


def _make_charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    def smoothed(metric: str) -> list[Curve]:
        return [curve for run in runs for curve in run.smoothed(metric)]

    def evaluation(field: str) -> list[Curve]:
        return [curve for run in runs for curve in run.evaluation(field)]

    return [
        LOSS_CHART(
            "Better: lower after the same tokens. These are moving means of the training loss, which compares between "
            "runs of one vocabulary and corpus alone.",
            smoothed("loss"),
        ),
        Chart(
            "validation-loss",
            "Validation loss",
            NATS_PER_TOKEN,
            "Better: lower after the same tokens. It is less noisy than the training loss.",
            evaluation("loss"),
            may_be_logarithmic=True,
        ),
        BITS_PER_BYTE_CHART(
            "Better: lower. It compares runs with different vocabularies, too.", evaluation("bits_per_byte")
        ),
        GRADIENT_NORM_CHART(
            "Better: level and without peaks; a run whose norm rises above the others' is about to diverge.",
            smoothed("gradient_norm"),
        ),
        LEARNING_RATE_CHART(
            "It shows where the schedules differ, which explains most differences of the loss.",
            smoothed("learning_rate"),
        ),
        THROUGHPUT_CHART(
            "Better: higher on the same nodes. First steps of processes are left out.", smoothed("tokens_per_second")
        ),
        MFU_CHART("Better: higher. It compares runs on different numbers of devices.", smoothed("mfu")),
        GOODPUT_CHART("Better: higher: the share of all time that made progress.", smoothed("goodput")),
    ]
