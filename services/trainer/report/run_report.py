"""Writes report.html, the page of a run: state and numbers, curves, stages, lineage, environment, events and a sample.

The page can be written while the run goes on, before its first checkpoint too, and as often as one likes. Its size does
not grow with the steps of the run.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from services.common.artifacts.files import total_bytes
from services.common.artifacts.manifest import Manifest, Phase, write_durably
from services.common.process.progress import write_duration
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import Recipe
from services.trainer.metrics.commands import CommandRecord
from services.trainer.metrics.events import read_events
from services.trainer.report.charts import MARKS, REPORT, ChartSection
from services.trainer.report.curves import DrawnChart, RunCurves
from services.trainer.report.page import Table, Tile, render, write_bytes, write_number, write_share
from services.trainer.runs.cost import StageCost
from services.trainer.runs.run import REPORT_FILE, Run, StartedRun
from services.trainer.runs.status import RunStatus, read_status
from services.trainer.runs.summary import summarize

_MAX_EVENTS, _MAX_ATTEMPTS, _MAX_PHASES = 200, 100, 60
_NO_SAMPLE = (
    "`python -m services.trainer report --run {run} --sample` adds a sample here, for which it loads the whole model."
)


def write_report(run: StartedRun, sample_text: str | None = None) -> Path:
    """Write `report.html` into the run's folder. The page needs no network and no other file.

    Without a sample of the model's writing the page says how to get one.
    """
    path = run.folder / REPORT_FILE
    write_durably(path, _render_report(run, sample_text).encode())
    return path


def read_state(run_folder: Path) -> str | None:
    """Return the `Run.state` of the report in this folder; None if there is no report or it has no state."""
    try:
        with (run_folder / REPORT_FILE).open(encoding="utf-8", errors="replace") as file:
            start = file.read(4096)
    except OSError:
        return None
    found = re.search(r'<meta name="millrace-state" content="([^"]*)">', start)
    return html.unescape(found[1]) if found else None


def _render_report(run: StartedRun, sample_text: str | None) -> str:
    curves = RunCurves(run.evaluations)
    run.steps.read(curves.add)
    events, now = read_events(run.folder), datetime.now(UTC)
    marks = curves.marks(events)
    charts = {section.id: list(_draw(section, curves, run.recipe)) for section in REPORT}
    return render(
        "report.html",
        title=run.folder.name,
        subtitle=f"Millrace run, written {now:%Y-%m-%d %H:%M} UTC",
        state=run.state if isinstance(run, Run) else "",
        tiles=list(_list_tiles(run, read_status(run.folder.parents[1], run.folder.name))),
        marks={kind: text for kind, text in MARKS.items() if kind in marks},
        chart_sections=REPORT,
        charts=charts,
        data={"runs": [curves.positions()], "marks": marks, "charts": list(chain.from_iterable(charts.values()))},
        lanes=_divide_lanes(run.phases),
        phases=_tabulate_phases(run.phases),
        costs=_tabulate_costs(run.costs),
        lineage=list(_tabulate_lineage(run)),
        recipe=run.recipe.model_dump_json(indent=1),
        environment=list(_tabulate_environment(run)),
        commands=_tabulate_commands(run.commands, now),
        events=_tabulate_events(events),
        sample=_NO_SAMPLE.format(run=run.folder.name) if sample_text is None else sample_text,
        summary=summarize(run) if isinstance(run, Run) else "",
        numbers=run.numbers | ({"evaluation": run.evaluations[-1]} if run.evaluations else {}),
    )


def _draw(section: ChartSection, curves: RunCurves, recipe: Recipe) -> Iterator[DrawnChart]:
    for chart in section.charts:
        limit = ("clipped above", recipe.optimizer.max_grad_norm) if chart.id == "gradient-norm" else None
        if drawn := [curve for series in chart.series for curve in curves.draw(series)]:
            yield DrawnChart(chart, drawn, limit)


def _list_tiles(run: StartedRun, status: RunStatus) -> Iterator[Tile]:
    numbers = run.numbers
    share = min(1.0, status.step / status.max_steps) if status.max_steps else None
    of_all = f" of {status.max_steps:,}" if status.max_steps else ""
    ended = f"; exit code {status.exit_code}" if status.exit_code else ""
    yield Tile("State", status.state, f"step {status.step:,}{of_all}{ended}", share)
    if "loss" in numbers:
        error = f"± {numbers['loss_standard_error']:.3f} " if "loss_standard_error" in numbers else ""
        steps = f"steps {numbers['loss_first_step']:,} to {numbers['loss_last_step']:,}"
        yield Tile("Training loss", f"{numbers['loss']:.3f}", f"{error}nats per token, mean of {steps}")
    else:
        yield Tile("Training loss", "none yet", "no step has updated the weights")
    if run.evaluations:
        newest = run.evaluations[-1]
        error = f"± {newest['standard_error']:.3f} " if newest["standard_error"] is not None else ""
        bits = f", {newest['bits_per_byte']:.3f} bits per byte" if newest["bits_per_byte"] is not None else ""
        yield Tile("Validation loss", f"{newest['loss']:.3f}", f"{error}at step {newest['step']:,}{bits}")
    else:
        yield Tile("Validation loss", "none yet", "no evaluation was made")
    if status.tokens is not None:
        total = f"of {write_number(status.total_tokens)}" if status.total_tokens else ""
        seen = min(1.0, status.tokens / status.total_tokens) if status.total_tokens else None
        yield Tile("Tokens seen", write_number(status.tokens), total, seen)
    left = "0 s" if status.state == "done" else "unknown"
    if status.seconds_left is not None:
        left = write_duration(status.seconds_left)
    yield Tile("Time left", left, f"began {status.began_at:%Y-%m-%d %H:%M} UTC" if status.began_at else "")
    if "tokens_per_second" in numbers:
        yield Tile("Tokens per second", write_number(numbers["tokens_per_second"]), "mean, without first steps")
    if "mfu" in numbers:
        causal = f"{write_share(numbers['mfu_causal'])} with causal attention once" if "mfu_causal" in numbers else ""
        yield Tile("MFU", write_share(numbers["mfu"]), causal)
    if status.goodput is not None:
        restarts = int(numbers.get("restarts", 0))
        yield Tile("Goodput", write_share(status.goodput), f"{restarts:,} restart{'' if restarts == 1 else 's'}")
    if status.cost is None:
        yield Tile("Cost so far", "unknown", "there is no price for these machines")
    else:
        yield Tile("Cost so far", f"${status.cost:,.2f}", "by on-demand prices, while nodes were held")
    if status.chip_hours is None:
        yield Tile("Chip-hours", "none", "no accelerator was held")
    else:
        yield Tile("Chip-hours", f"{status.chip_hours:,.2f}", "accelerators times the hours they were held")


class _Lane(NamedTuple):
    """The bar of a stage, whose lengths are shares of the work of all stages."""

    stage: str
    color: int
    before: float
    parts: list[float]
    text: str


def _divide_lanes(stages: Mapping[str, Sequence[Phase]]) -> list[_Lane]:
    """Return a bar for each stage that has phases. A bar of more than _MAX_PHASES ends with the sum of the others."""
    total = sum(phase.seconds for phases in stages.values() for phase in phases)
    lanes, before = [], 0.0
    for color, (stage, phases) in enumerate(stages.items()):
        if not phases or not total:
            continue
        sums: dict[str, float] = {}
        for phase in phases:
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
        seconds = [phase.seconds for phase in phases]
        parts = [*seconds[: _MAX_PHASES - 1], sum(seconds[_MAX_PHASES - 1 :])]
        names = ", ".join(f"{name} {write_duration(each)}" for name, each in sums.items())
        text = f"{write_duration(sum(seconds))}: {names}"
        lanes.append(_Lane(stage, color, before, [part / total for part in parts if part], text))
        before += sum(seconds) / total
    return lanes


def _tabulate_phases(stages: Mapping[str, Sequence[Phase]]) -> Table:
    rows = [
        (stage, phase.name, f"{phase.started_at:%Y-%m-%d %H:%M:%S}", write_duration(phase.seconds))
        for stage, phases in stages.items()
        for phase in phases[-_MAX_PHASES:]
    ]
    return Table("Phases of the stages", ("stage", "phase", "began (UTC)", "took"), rows)


def _tabulate_costs(costs: Sequence[StageCost]) -> Table:
    rows = [
        (
            cost.stage,
            *(f"{each:,.2f}" for each in (cost.held_node_hours, cost.computing_node_hours, cost.lost_node_hours)),
            "none" if cost.chip_hours is None else f"{cost.chip_hours:,.1f}",
            "unknown" if cost.dollars is None else f"{cost.dollars:,.2f}",
            cost.price_source or "",
        )
        for cost in costs
    ]
    hours = ("node-hours held", "computing", "lost to restarts")
    return Table("Costs", ("stage", *hours, "chip-hours", "dollars on demand", "price"), rows)


def _tabulate_lineage(run: StartedRun) -> Iterator[Table]:
    artifacts: list[tuple[str, Path, Manifest]] = [("corpus", run.corpus.path, run.corpus.manifest)]
    if run.cache:
        artifacts.append(("compile cache", run.cache.path, run.cache.manifest))
    if isinstance(run, Run):
        artifacts.append(("newest checkpoint", run.checkpoint.path, run.checkpoint.manifest))
    rows = [
        (
            kind,
            f"{path.parent.name}/{path.name}",
            write_bytes(total_bytes(manifest.files)),
            manifest.content_digest[:12],
            f"{manifest.producer.service} {manifest.producer.version}",
            manifest.producer.git_sha[:12],
            manifest.producer.image,
        )
        for kind, path, manifest in artifacts
    ]
    headings = ("artifact", "name", "size", "content digest", "made by", "commit", "image")
    yield Table("Artifacts", headings, rows)
    counts = [
        (split, f"{each.documents:,}", f"{each.tokens:,}", write_bytes(each.text_bytes))
        for split, each in run.corpus.manifest.corpus.splits.items()
    ]
    yield Table("Corpus", ("split", "documents", "tokens", "text"), counts)
    if parent := run.parent:
        row = (parent.run, f"{parent.step:,}", f"{parent.tokens:,}", parent.content_digest[:12])
        yield Table("Branched from", ("run", "after step", "tokens", "content digest"), [row])
    preset = run.recipe.model.preset
    baseline = f"the preset {preset} and the defaults" if preset else "the defaults"
    usual = {f"model.{name}": value for name, value in MODEL_PRESETS.get(preset or "", {}).items()}
    changed = list(_changed_values(run.recipe, usual))
    yield Table(f"Recipe: what differs from {baseline}", ("field", "value", "preset or default"), changed)


def _changed_values(section: Any, usual: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the dotted name, the value and the usual value, or else the default, of each field where they differ."""
    for name, field in type(section).model_fields.items():
        value, full = getattr(section, name), prefix + name
        if hasattr(type(value), "model_fields"):
            yield from _changed_values(value, usual, f"{full}.")
            continue
        default = usual.get(
            full,
            None if field.is_required() else field.get_default(call_default_factory=True, validated_data=dict(section)),
        )
        if value != default:
            yield full, _write_value(value), "none" if default is None else _write_value(default)


def _write_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_write_value, value))
    if hasattr(type(value), "model_fields"):
        return " ".join(f"{name} {each}" for name, each in value.model_dump(exclude_defaults=True).items())
    return f"{value:,}" if type(value) is int else str(value)


def _tabulate_environment(run: StartedRun) -> Iterator[Table]:
    facts = run.cache.manifest.compile_cache.facts if run.cache else {}
    rows = [(name, str(value)) for name, value in facts.items() if not isinstance(value, dict | list)]
    rows += [(f"parallel.{name}", str(value)) for name, value in run.recipe.parallel]
    yield Table("Program and machine", ("fact", "value"), rows)
    attempts = [
        (
            _write_time(each["started_at"]),
            *(str(each.get(name, "")) for name in ("launch", "workers", "first_step", "last_step")),
            write_duration(each["setup_seconds"]),
            write_duration(each["train_seconds"]),
            str(each.get("ended_by", "")),
            f"{each['graphs_compiled']:,}",
        )
        for each in reversed(run.attempts[-_MAX_ATTEMPTS:])
    ]
    headings = ("began (UTC)", "launch", "workers", "from step", "to step", "start", "training", "ended by", "misses")
    yield Table("Starts of the workers that were not killed, newest first", headings, attempts)


def _tabulate_commands(commands: Sequence[CommandRecord], now: datetime) -> Table:
    rows = []
    for each in reversed(commands[-_MAX_ATTEMPTS:]):
        ended = "killed, or its node was lost" if each.exit_code is None else f"exit code {each.exit_code}"
        if each.lives(now.timestamp()):
            ended = "it runs"
        seen = _write_time(each.ended_at or each.seen_at)
        rows.append((_write_time(each.began_at), seen, ended, f"{each.nodes:,}", f"{each.workers:,}", each.error or ""))
    headings = ("began (UTC)", "ended or last seen (UTC)", "how it ended", "nodes", "workers", "error")
    return Table("Commands that trained the run, newest first", headings, rows)


_TECHNICAL = frozenset({"event", "time", "attempt", "start", "stacks"})
"""Fields of an event that are no facts for the reader."""


def _tabulate_events(events: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the newest events, the newest first."""
    shown = f"the newest {_MAX_EVENTS:,} of {len(events):,}" if len(events) > _MAX_EVENTS else "newest first"
    rows = []
    for event in reversed(events[-_MAX_EVENTS:]):
        facts = ", ".join(
            f"{name.replace('_', ' ')} {f'{value:.6g}' if isinstance(value, float) else value}"
            for name, value in event.items()
            if name not in _TECHNICAL
        )
        at = _write_time(event["time"]) if "time" in event else "unknown"
        rows.append((at, str(event["event"]).replace("_", " "), facts))
    return Table(f"Events, {shown}", ("time (UTC)", "event", "facts"), rows)


def _write_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
