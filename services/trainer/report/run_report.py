"""Writes report.html, the page of a run: state and numbers, curves, stages, lineage, environment, events and a sample.

The page can be written while the run goes on, before its first checkpoint too, and as often as one likes. Its size and
the memory that it takes do not grow with the steps of the run.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common.artifacts.files import total_bytes
from services.common.artifacts.manifest import Manifest, write_durably
from services.common.input.files import open_regular_file
from services.common.process.duration import write_duration
from services.common.recipe.presets import MODEL_PRESETS
from services.common.recipe.schema import Recipe
from services.trainer.metrics.commands import CommandRecord
from services.trainer.metrics.events import read_events
from services.trainer.report.axis import write_bytes, write_number, write_share
from services.trainer.report.chart import draw_axis_choice, draw_chart
from services.trainer.report.page import (
    Tile,
    make_details,
    make_grid,
    make_page,
    make_section,
    make_table,
    make_text,
    make_tiles,
    shorten,
)
from services.trainer.report.run_charts import MARKS, make_charts
from services.trainer.report.run_curves import RunCurves
from services.trainer.report.timeline import draw_timeline
from services.trainer.run import REPORT_FILE, Run, StartedRun, summarize
from services.trainer.runs.cost import StageCost
from services.trainer.runs.status import RunStatus, read_status

NUMBERS_ELEMENT = "millrace-numbers"
"""Id of the page's element with the numbers of `StartedRun.numbers` and the newest evaluation as a JSON object."""
_MOST_EVENTS, _MOST_ATTEMPTS = 200, 100
"""Characters of a cell at most. An event may hold the messages of many workers."""
_NO_SAMPLE = (
    "`python -m services.trainer report --run {run} --sample` adds a sample here, for which it loads the whole model."
)


def write_report(run: StartedRun, sample_text: str | None = None) -> Path:
    """Write `report.html` into the run's folder. The page needs no network and no other file.

    Without a sample of the model's writing the page says how to get one.
    """
    path = run.folder / REPORT_FILE
    write_durably(path, _make_report(run, sample_text).encode())
    return path


def read_state(run_folder: Path) -> str | None:
    """Return the `Run.state` of the report in this folder; None if there is no report or it has no state."""
    try:
        with open_regular_file(run_folder / REPORT_FILE) as file:
            begin = file.read(4096).decode(errors="replace")
    except OSError:
        return None
    found = re.search(r'<meta name="millrace-state" content="([^"]*)">', begin)
    return html.unescape(found[1]) if found else None


def _make_report(run: StartedRun, sample_text: str | None) -> str:
    curves = RunCurves(run.evaluations)
    run.steps.read(curves.add)
    events = read_events(run.folder)
    status = read_status(run.folder.parents[1], run.folder.name)
    newest = {"evaluation": run.evaluations[-1]} if run.evaluations else {}
    written_at = datetime.now(UTC)
    return make_page(
        run.folder.name,
        f"Millrace run, written {written_at:%Y-%m-%d %H:%M} UTC",
        _make_sections(run, curves, events, status, written_at, sample_text),
        state=run.state if isinstance(run, Run) else "",
        numbers={**run.numbers, **newest},
        numbers_id=NUMBERS_ELEMENT,
    )


def _make_sections(
    run: StartedRun,
    curves: RunCurves,
    events: Sequence[Mapping[str, Any]],
    status: RunStatus,
    written_at: datetime,
    sample_text: str | None,
) -> Iterator[str]:
    yield make_tiles(_make_tiles(run, status))
    charts = make_charts(curves, run.recipe, events)
    if curves.num_steps:
        yield draw_axis_choice() + _draw_mark_legend({mark.kind for mark in curves.marks(events)})
    for section in charts:
        yield make_section(section.identifier, section.title, make_grid(map(draw_chart, section.charts)), section.lead)
    yield make_section(
        "stages",
        "How long did each stage take?",
        draw_timeline(run.phases) + make_table("Costs", _COST_HEADINGS, map(_cost_row, run.costs)),
        "The time between stages, which may be days, is left out. Nodes are held while commands run.",
    )
    yield make_section("lineage", "What was it made of?", "".join(_make_lineage(run)))
    yield make_section("environment", "Where did it run?", "".join(_make_environment(run)))
    happened = _make_commands(run, written_at) + (_make_events(events) or "<p>No event was recorded.</p>")
    yield make_section("events", "What happened?", happened)
    sample = make_text(_NO_SAMPLE.format(run=run.folder.name) if sample_text is None else sample_text)
    yield make_section("sample", "What does the model write?", sample)
    if isinstance(run, Run):
        yield make_section("summary", "Summary as text", make_text(summarize(run)))


def _make_tiles(run: StartedRun, status: RunStatus) -> Iterator[Tile]:
    numbers = run.numbers
    share = status.step / status.max_steps if status.max_steps else None
    of_all = f" of {status.max_steps:,}" if status.max_steps else ""
    ended = f"; exit code {status.exit_code}" if status.exit_code else ""
    yield Tile("State", status.state, f"step {status.step:,}{of_all}{ended}", min(1.0, share) if share else share)
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
    began = f"began {status.began_at:%Y-%m-%d %H:%M} UTC" if status.began_at else ""
    yield Tile("Time left", left, began)
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


def _draw_mark_legend(kinds: set[str]) -> str:
    items = "".join(
        f'<li class="{kind}"><i class="line"></i>{html.escape(text)}</li>'
        for kind, text in MARKS.items()
        if kind in kinds
    )
    return f'<ul class="legend marks" aria-label="Marks in the charts">{items}</ul>' if items else ""


def _make_lineage(run: StartedRun) -> Iterator[str]:
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
    yield make_table("Artifacts", headings, rows)
    counts = run.corpus.manifest.corpus.splits
    yield make_table(
        "Corpus",
        ("split", "documents", "tokens", "text"),
        [
            (split, f"{each.documents:,}", f"{each.tokens:,}", write_bytes(each.text_bytes))
            for split, each in counts.items()
        ],
    )
    if parent := run.parent:
        row = (parent.run, f"{parent.step:,}", f"{parent.tokens:,}", parent.content_digest[:12])
        yield make_table("Branched from", ("run", "after step", "tokens", "content digest"), [row])
    preset = run.recipe.model.preset
    baseline = f"the preset {preset} and the defaults" if preset else "the defaults"
    changed = [(name, shorten(value), shorten(usual)) for name, value, usual in changed_values(run.recipe)]
    yield make_table(f"Recipe: what differs from {baseline}", ("field", "value", "preset or default"), changed)
    yield make_details("The whole recipe", make_text(run.recipe.model_dump_json(indent=1)))


def changed_values(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of a recipe that differ from its model's preset or, without one, from the default.

    Each has the field's dotted name, its value, and the usual value, which is `none` where the field has none.
    """
    usual = {f"model.{name}": value for name, value in MODEL_PRESETS.get(recipe.model.preset or "", {}).items()}
    yield from _changed_values(recipe, usual, "")


def _changed_values(section: Any, usual: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
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


def _make_environment(run: StartedRun) -> Iterator[str]:
    facts = run.cache.manifest.compile_cache.facts if run.cache else {}
    rows = [(name, shorten(str(value))) for name, value in facts.items() if not isinstance(value, dict | list)]
    parallel = run.recipe.parallel
    rows += [(f"parallel.{name}", str(getattr(parallel, name))) for name in type(parallel).model_fields]
    yield make_table("Program and machine", ("fact", "value"), rows)
    attempts = [
        (
            _write_time(each["started_at"]),
            *(shorten(str(each.get(name, ""))) for name in ("launch", "workers", "first_step", "last_step")),
            write_duration(each["setup_seconds"]),
            write_duration(each["train_seconds"]),
            shorten(str(each.get("ended_by", ""))),
            f"{each['graphs_compiled']:,}",
        )
        for each in reversed(run.attempts[-_MOST_ATTEMPTS:])
    ]
    headings = ("began (UTC)", "launch", "workers", "from step", "to step", "start", "training", "ended by", "misses")
    yield make_table("Starts of the workers that were not killed, newest first", headings, attempts)


def _make_commands(run: StartedRun, written_at: datetime) -> str:
    """Return a table of the commands that trained the run, the newest first."""
    rows = [
        (
            _write_time(each.began_at),
            *((_write_time(each.seen_at), "it runs") if each.lives(written_at.timestamp()) else _write_end(each)),
            f"{each.nodes:,}",
            f"{each.workers:,}",
            shorten(each.error or ""),
        )
        for each in reversed(run.commands[-_MOST_ATTEMPTS:])
    ]
    headings = ("began (UTC)", "ended or last seen (UTC)", "how it ended", "nodes", "workers", "error")
    return make_table("Commands that trained the run, newest first", headings, rows)


def _write_end(command: CommandRecord) -> tuple[str, str]:
    """Return when a command was last seen, and how it ended: a command that was killed could not record its end."""
    ended = "killed, or its node was lost" if command.exit_code is None else f"exit code {command.exit_code}"
    return _write_time(command.ended_at or command.seen_at), ended


_COST_HEADINGS = (
    *("stage", "node-hours held", "computing", "lost to restarts"),
    *("chip-hours", "dollars on demand", "price"),
)


def _cost_row(cost: StageCost) -> tuple[str, ...]:
    hours = (f"{each:,.2f}" for each in (cost.held_node_hours, cost.computing_node_hours, cost.lost_node_hours))
    chip_hours = "none" if cost.chip_hours is None else f"{cost.chip_hours:,.1f}"
    dollars = "unknown" if cost.dollars is None else f"{cost.dollars:,.2f}"
    return cost.stage, *hours, chip_hours, dollars, cost.price_source or ""


_TECHNICAL = frozenset({"event", "time", "attempt", "start", "stacks"})


def _make_events(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the newest events, the newest first; empty if there is none."""
    shown = f", the newest {_MOST_EVENTS:,} of {len(events):,}" if len(events) > _MOST_EVENTS else ", newest first"
    rows = [_event_row(event) for event in reversed(events[-_MOST_EVENTS:])]
    return make_table(f"Events{shown}", ("time (UTC)", "event", "facts"), rows)


def _event_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    at = event.get("time")
    is_time = isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at <= 4_102_444_800
    facts = ", ".join(f"{_spell(name)} {_write_fact(value)}" for name, value in event.items() if name not in _TECHNICAL)
    return _write_time(at) if is_time and at is not None else "unknown", shorten(_spell(event["event"])), shorten(facts)


def _spell(name: Any) -> str:
    return str(name).replace("_", " ")


def _write_fact(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write_time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
