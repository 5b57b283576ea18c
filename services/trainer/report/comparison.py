"""Compares runs of a root: their newest numbers, the recipe values in which they differ, and their curves.

The curves of the runs lie over one another in comparison.html, whose size grows with the runs, not with their steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.manifest import write_durably
from services.common.artifacts.store import open_artifact
from services.common.errors import ArtifactError, RecipeError
from services.common.problem_list import list_names
from services.common.recipe.changes import differing_values
from services.common.recipe.schema import fingerprint
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import run_folder
from services.trainer.metrics.records import steps_newest_first
from services.trainer.report.curves import CHARTS, DrawnChart, RunCurves, Series
from services.trainer.report.page import render
from services.trainer.runs.description import read_description
from services.trainer.runs.status import (
    STATUS_HEADINGS,
    UNKNOWN,
    describe_status,
    find_runs,
    fit_columns,
    print_json,
    print_table,
    read_status,
)

COMPARISON_FILE = "comparison.html"
MAX_RUNS = 8
"""Runs that are compared at most: the page has as many colours."""
COMPARED = ("loss", "bits-per-byte", "gradient-norm", "learning-rate", "throughput", "mfu", "goodput")
"""Charts with which runs are compared, by their first series."""
OTHER_TEXT = "The runs are evaluated on different text: only losses on the same text compare."


def compare_runs(root: Path, names: Sequence[str], *, as_json: bool = False) -> int:
    """Print the newest numbers of runs and the recipe values in which they differ, and write comparison.html.

    With `as_json` print one line for each run, and write no page. `names` are names of runs, or prefixes of several.
    """
    runs = list(dict.fromkeys(run for name in names for run in find_runs(root, name)))
    if not 2 <= len(runs) <= MAX_RUNS:
        raise RecipeError(f"{' '.join(names)} names {list_names(runs)}: {len(runs)} run(s), expected 2 to {MAX_RUNS}.")
    statuses = [read_status(root, run) for run in runs]
    if as_json:
        print_json(statuses)
        return 0
    numbers = [STATUS_HEADINGS, *map(describe_status, statuses)]
    differing = differing_values([status.recipe for status in statuses])
    values = [("recipe value", *runs), *((name, *texts) for name, texts in differing.items())]
    losses = _losses_by_corpus(root, runs)
    print_table(*fit_columns(numbers))
    if losses:
        print(f"\n{OTHER_TEXT}")
        print_table(*losses)
    print()
    print_table(*values)
    path = write_comparison(root, runs, numbers=fit_columns(numbers, sys.maxsize), losses=losses, values=values)
    print(f"\n{path}")
    return 0


def write_comparison(root: Path, runs: Sequence[str], **tables: Sequence[Sequence[str]]) -> Path:
    """Write the page into the folder of all runs, and return its path.

    The tables are the runs' newest `numbers`, the `losses` of `_losses_by_corpus` and the recipe `values` that differ,
    each with its row of headings.
    """
    curves = {run: _read_curves(run_folder(root, run)) for run in runs}
    series = {"validation-loss": Series("evaluation.loss")} | {name: CHARTS[name][0] for name in COMPARED}
    charts = {name: drawn for name, each in series.items() if (drawn := _draw(each, curves)).curves}
    page = render(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        subtitle=f"Millrace runs, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        other_text=OTHER_TEXT,
        **tables,
        data={"runs": [each.positions() for each in curves.values()], "marks": {}, "charts": charts},
    )
    path = run_folder(root, COMPARISON_FILE)
    write_durably(path, page.encode())
    return path


def _losses_by_corpus(root: Path, runs: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the newest validation loss of each run on each corpus as a table with its row of headings; empty where
    all runs are evaluated on the same targets.
    """
    found = [dict(_read_losses(root, run)) for run in runs]
    if len({frozenset(losses) for losses in found if losses}) < 2:
        return []
    labels = {targets: label for losses in found for targets, (label, _) in losses.items()}
    rows = ((label, *(losses.get(targets, ("", UNKNOWN))[1] for losses in found)) for targets, label in labels.items())
    return [("validation loss on", *runs), *rows]


def _read_losses(root: Path, run: str) -> Iterator[tuple[tuple[str, int], tuple[str, str]]]:
    """Yield what says on which targets of each corpus a run is evaluated, and a name of them with its newest loss."""
    folder = run_folder(root, run)
    paths, evaluations = read_description(folder).paths, read_evaluations(folder)
    if not evaluations:
        return
    sources = evaluations[-1]["sources"].items()
    mixed = {place: mean for name, mean in sources if (place := paths.get(f"corpus {name}"))}
    for place, mean in (mixed or {paths["corpus"]: evaluations[-1]}).items():
        path = root / place
        try:
            split = open_artifact(path, CorpusManifest).manifest.corpus.splits["validation"]
            digest = fingerprint(split.check_digests)
        except ArtifactError:  # the corpus is gone
            digest = path.name
        label = f"{path.parent.name}/{path.name}, {mean['tokens']:,} tokens"
        yield (digest, mean["tokens"]), (label, f"{mean['loss']:.4f}")


def _read_curves(folder: Path) -> RunCurves:
    curves = RunCurves(read_evaluations(folder))
    for record in steps_newest_first(folder):
        curves.add(record)
    return curves


def _draw(series: Series, runs: dict[str, RunCurves]) -> DrawnChart:
    """Draw the moving means alone: the pale curves of several runs would hide one another."""
    found = [
        replace(curve, name=name, color=number, run=number)
        for number, (name, curves) in enumerate(runs.items())
        for curve in curves.draw(series)
        if not curve.is_faint
    ]
    return DrawnChart(found)
