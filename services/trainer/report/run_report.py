"""Writes report.html, the page of a run: state and numbers, curves, stages, lineage, environment, events and a sample.

The page can be written while the run goes on, before its first checkpoint too, and as often as one likes. Its size does
not grow with the steps of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.files import total_bytes
from services.common.artifacts.manifest import Phase, write_durably
from services.common.process.progress import write_duration
from services.common.recipe.changes import flatten
from services.trainer.checkpoints.lookup import run_command
from services.trainer.metrics.events import read_events
from services.trainer.metrics.run_numbers import RunNumbers
from services.trainer.report.curves import CHARTS, DrawnChart, RunCurves
from services.trainer.report.page import render
from services.trainer.runs.run import REPORT_FILE, Run
from services.trainer.runs.summary import describe_training, list_facts, summarize

_MAX_PHASES = 60
_NO_SAMPLE = "`{command}` adds a sample here, for which it loads the whole model."


def write_report(run: Run, sample_text: str | None = None) -> Path:
    """Write `report.html` into the run's folder. The page needs no network and no other file.

    Without a sample of the model's writing the page says how to get one.
    """
    path = run.folder / REPORT_FILE
    write_durably(path, _render_report(run, sample_text).encode())
    return path


def _render_report(run: Run, sample_text: str | None) -> str:
    curves, checkpoint = RunCurves(run.evaluations), run.newest_checkpoint
    run.step_numbers = RunNumbers(run.folder, curves.add)  # the steps are read once
    events = read_events(run.folder)
    limits = {"gradient-norm": ("clipped above", run.recipe.optimizer.max_grad_norm)}
    charts = {
        name: DrawnChart(drawn, limits.get(name))
        for name, chart in CHARTS.items()
        if (drawn := [curve for series in chart for curve in curves.draw(series)])
    }
    corpora = [(f"corpus {name}" if len(run.corpora) > 1 else "corpus", each) for name, each in run.corpora.items()]
    others = (("compile cache", run.cache), ("newest checkpoint", checkpoint))
    return render(
        "report.html",
        title=run.name,
        subtitle=f"{describe_training(run)}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        run=run,
        run_facts=list(list_facts(run)),
        data={"runs": [curves.positions()], "marks": curves.marks(events), "charts": charts},
        lanes=list(_divide_lanes(run.phases)),
        phases=[(stage, phase) for stage, phases in run.phases.items() for phase in phases[-_MAX_PHASES:]],
        artifacts=[(kind, each.path, each.manifest) for kind, each in (*corpora, *others) if each],
        artifact_bytes=total_bytes,
        splits=[(name, *split) for name, each in corpora for split in each.manifest.corpus.splits.items()],
        changed_values=flatten(run.recipe.model_dump(mode="json", exclude_defaults=True)),
        program_facts=[
            *(run.cache.manifest.compile_cache.facts.items() if run.cache else ()),
            *((f"parallel.{name}", value) for name, value in run.recipe.parallel),
        ],
        now=time.time(),
        events=events,
        sample=_NO_SAMPLE.format(command=run_command(run.root, "report", run.name, "--sample"))
        if sample_text is None
        else sample_text,
        summary=summarize(run) if checkpoint else "",
        numbers=run.numbers | ({"evaluation": run.evaluations[-1]} if run.evaluations else {}),
    )


class _Lane(NamedTuple):
    """The bar of a stage with a part for each kind of phase; lengths are shares of the work of all stages."""

    stage: str
    color: int
    before: float
    parts: list[float]
    text: str


def _divide_lanes(stages: Mapping[str, Sequence[Phase]]) -> Iterator[_Lane]:
    """Yield a bar for each stage that has phases."""
    total = sum(phase.seconds for phases in stages.values() for phase in phases)
    before = 0.0
    for color, (stage, phases) in enumerate(stages.items()):
        seconds: dict[str, float] = {}
        for phase in phases:
            seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        if own := sum(seconds.values()):
            text = ", ".join(f"{name} {write_duration(each)}" for name, each in seconds.items())
            parts = [each / total for each in seconds.values()]
            yield _Lane(stage, color, before, parts, f"{write_duration(own)}: {text}")
            before += own / total
