"""Writes report.html: one self-contained page with the curves of a run and a timeline of the three stages."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from services.common.artifacts.manifest import write_durably
from services.common.input.files import open_regular_file
from services.trainer.run import REPORT_FILE, Run, summarize

_COLORS = {"tokenizer": "#4c78a8", "compiler": "#f58518", "trainer": "#54a24b"}
_FADES = (1.0, 0.75, 0.55, 0.4, 0.85, 0.65)
_LABELLED_SHARE = 0.04  # a narrower bar has no room for its name, but hovering shows it
_CONFIG = {"displaylogo": False, "displayModeBar": False}
NUMBERS_ELEMENT = "millrace-numbers"
"""Id of the page's element with the numbers of `Run.numbers` as a JSON object."""


class _Panel(NamedTuple):
    """A diagram with the curves of some metrics."""

    title: str
    curves: dict[str, str]
    """Names of the curves by metric. A metric with a label has a curve for each value of its label."""
    axis: Mapping[str, str] = MappingProxyType({})


_VALIDATION_LOSS = "evaluated_loss"
_SHARES = {"rangemode": "tozero", "tickformat": ".1%"}
_PANELS = (
    _Panel("loss, nats per token", {"loss": "training loss", _VALIDATION_LOSS: "validation loss"}),
    _Panel("validation loss by source", {"evaluated_loss_by_source": "validation"}),
    _Panel("validation, bits per byte", {"evaluated_bits_per_byte": "bits per byte"}),
    _Panel("learning rate", {"learning_rate": "learning rate"}),
    _Panel("throughput, tokens/s", {"tokens_per_second": "tokens/s"}, {"rangemode": "tozero"}),
    _Panel("MFU, share of the peak", {"mfu": "MFU (PaLM)", "mfu_causal": "MFU (causal attention once)"}, _SHARES),
    _Panel("share of the time", {"goodput": "goodput", "data_share": "data wait, of a step"}, _SHARES),
    _Panel("gradient norm before clipping", {"gradient_norm": "gradient", "gradient_norm_by_group": "gradient"}),
    _Panel("norm of the update over the weights'", {"update_ratio_by_group": "update"}),
    _Panel("share of clipped steps", {"clipped_share": "clipped steps"}, _SHARES),
    _Panel("largest logit", {"largest_logit": "largest logit"}),
    _Panel("activations after the last layer, RMS", {"activation_rms": "activations"}, {"rangemode": "tozero"}),
)
_COLUMNS = 3


def write_report(run: Run, sample_text: str | None = None) -> Path:
    """Write `report.html` into the run's folder. The page needs no network and no other file.

    Without a sample of the model's writing the page says how to get one.
    """
    curves = _curves(run).to_html(full_html=False, include_plotlyjs="inline", config=_CONFIG)
    timeline = _timeline(run).to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    page = _PAGE.format(
        name=html.escape(run.folder.name),
        state=html.escape(run.state),
        summary=html.escape(summarize(run)),
        numbers=_numbers(run),
        sample=html.escape(_NO_SAMPLE if sample_text is None else sample_text),
        curves=curves,
        timeline=timeline,
    )
    write_durably(run.folder / REPORT_FILE, page.encode())
    return run.folder / REPORT_FILE


def read_state(run_folder: Path) -> str | None:
    """Return the `Run.state` of the report in this folder; None if there is no report or it has no state."""
    try:
        with open_regular_file(run_folder / REPORT_FILE) as file:
            begin = file.read(4096).decode(errors="replace")
    except OSError:
        return None
    found = re.search(r'<meta name="millrace-state" content="([^"]*)">', begin)
    return html.unescape(found[1]) if found else None


def _numbers(run: Run) -> str:
    """Return the run's numbers and its newest evaluation as JSON for an HTML element of type application/json.

    JSON has neither infinities nor NaN, in whose place it has null.
    """
    newest = {"evaluation": run.evaluations[-1]} if run.evaluations else {}
    return json.dumps(_without_infinities({**run.numbers, **newest}), indent=1).replace("</", "<\\/")


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinities(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _curves(run: Run) -> go.Figure:
    """Draw the curves of _PANELS over optimizer steps, with a button for an axis in tokens."""
    records = [*run.metrics, *_records_of_evaluations(run)]
    num_rows = -(-len(_PANELS) // _COLUMNS)
    titles = [panel.title for panel in _PANELS]
    figure = make_subplots(rows=num_rows, cols=_COLUMNS, subplot_titles=titles, vertical_spacing=0.28 / num_rows)
    axes: dict[str, list[list[int]]] = {"step": [], "tokens": []}
    for number, panel in enumerate(_PANELS):
        place = {"row": number // _COLUMNS + 1, "col": number % _COLUMNS + 1}
        curves = [curve for metric, name in panel.curves.items() for curve in _find_curves(records, metric, name)]
        for curve in curves:
            mode = "lines" if len(curve.records) > len(run.metrics) // 2 else "lines+markers"
            x, errors = [record["step"] for record in curve.records], {}
            if panel.curves.get(_VALIDATION_LOSS) == curve.name:
                errors["error_y"] = {"array": [record["standard_error"] or 0.0 for record in curve.records]}
            options = {"name": curve.name, "mode": mode, "showlegend": len(curves) > 1, **errors, **place}
            figure.add_scatter(x=x, y=curve.values, **options)
            axes["step"].append(x)
            axes["tokens"].append([record.get("tokens", 0) for record in curve.records])
        figure.update_yaxes(**panel.axis, **place)
    buttons = [{"label": name, "method": "restyle", "args": [{"x": x}]} for name, x in axes.items()]
    menu: dict[str, Any] = {"type": "buttons", "direction": "right", "buttons": buttons, "pad": {"b": 40}}
    menu |= {"x": 0.0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"}
    figure.update_layout(template="plotly_white", height=340 * num_rows, updatemenus=[menu])
    figure.update_layout(legend={"orientation": "h", "y": -0.15 / num_rows, "yanchor": "top"})
    return figure


class _Curve(NamedTuple):
    name: str
    records: list[dict[str, Any]]
    """Records that have a value."""
    values: list[float]


def _find_curves(records: Sequence[dict[str, Any]], metric: str, name: str) -> Iterator[_Curve]:
    """Yield the curves of a metric: one, or one for each value of its label."""
    known = [record for record in records if metric in record]  # `mfu` needs a known peak
    labels = dict.fromkeys(label for record in known if isinstance(record[metric], dict) for label in record[metric])
    for label in labels:
        having = [record for record in known if label in record[metric]]
        yield _Curve(f"{name}: {label}", having, [record[metric][label] for record in having])
    if known and not labels:
        yield _Curve(name, known, [record[metric] for record in known])


def _records_of_evaluations(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each evaluation in the form of a step's record, with the tokens that the run had trained on."""
    tokens = {record["step"]: record.get("tokens", 0) for record in run.metrics}
    if parent := run.checkpoint.manifest.checkpoint.parent:
        tokens.setdefault(parent.step, parent.tokens)
    for evaluation in run.evaluations:
        known = {
            _VALIDATION_LOSS: evaluation["loss"],
            "evaluated_bits_per_byte": evaluation["bits_per_byte"],
            "evaluated_loss_by_source": {label: mean["loss"] for label, mean in evaluation["sources"].items()} or None,
        }
        place = {name: evaluation[name] for name in ("step", "standard_error")}
        yield {
            **place,
            "tokens": tokens.get(evaluation["step"], 0),
            **{name: value for name, value in known.items() if value is not None},
        }


def _timeline(run: Run) -> go.Figure:
    """Draw the seconds of work of all stages in a row, without the gaps between stages, which may be days."""
    figure = go.Figure()
    start = 0.0
    total_seconds = sum(phase.seconds for phases in run.phases().values() for phase in phases)
    for stage, phases in run.phases().items():
        for phase, fade in zip(phases, _FADES * len(phases), strict=False):
            figure.add_bar(
                y=[stage],
                x=[phase.seconds],
                base=[start],
                orientation="h",
                marker={"color": _COLORS[stage], "opacity": fade},
                text=phase.name if phase.seconds > _LABELLED_SHARE * total_seconds else None,
                textposition="inside",
                insidetextanchor="middle",
                hovertext=f"{stage}: {phase.name}, {phase.seconds:.1f} s from {phase.started_at:%Y-%m-%d %H:%M:%S} UTC",
                hoverinfo="text",
                showlegend=False,
            )
            start += phase.seconds
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        template="plotly_white",
        height=260,
        barmode="overlay",
        title="Work of the three stages",
        xaxis_title="seconds of work (the time between stages is left out)",
    )
    return figure


_NO_SAMPLE = "`python -m services.trainer report --sample` adds a sample here, for which it loads the whole model."
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name} - Millrace run</title>
<meta name="millrace-state" content="{state}">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: #222 }}
pre {{ background: #f6f6f4; padding: 1rem; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body>
<h1>{name}</h1>
<pre>{summary}</pre>
<script type="application/json" id="millrace-numbers">{numbers}</script>
{curves}
{timeline}
<h2>What the model writes</h2>
<pre>{sample}</pre>
</body></html>
"""
