"""Writes report.html: one self-contained page with the curves of a run and a timeline of the three stages."""

from __future__ import annotations

import html
import re
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from services.common.artifacts.manifest import write_durably
from services.common.input.files import open_regular_file
from services.trainer.run import REPORT_FILE, Run, summarize

_COLORS = {"tokenizer": "#4c78a8", "compiler": "#f58518", "trainer": "#54a24b"}
_FADES = (1.0, 0.75, 0.55, 0.4, 0.85, 0.65)
_LABELLED_SHARE = 0.04  # a narrower bar has no room for its name, but hovering shows it
_CONFIG = {"displaylogo": False, "displayModeBar": False}


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


def _curves(run: Run) -> go.Figure:
    steps = [record["step"] for record in run.metrics]
    figure = make_subplots(
        rows=2,
        cols=3,
        subplot_titles=(
            *("loss, nats per token", "learning rate", "throughput, tokens/s"),
            *("MFU, share of the peak", "goodput, share of the time", "data wait, share of the step"),
        ),
    )
    losses = [record["loss"] for record in run.metrics]
    figure.add_scatter(x=steps, y=losses, name="training loss", line={"color": "#4c78a8"}, row=1, col=1)
    figure.add_scatter(
        x=[evaluation["step"] for evaluation in run.evaluations],
        y=[evaluation["loss"] for evaluation in run.evaluations],
        error_y={"array": [evaluation["standard_error"] or 0.0 for evaluation in run.evaluations]},
        name="validation loss",
        mode="lines+markers",
        line={"color": "#e45756"},
        row=1,
        col=1,
    )
    rates = [record["learning_rate"] for record in run.metrics]
    figure.add_scatter(x=steps, y=rates, name="learning rate", line={"color": "#f58518"}, row=1, col=2)
    speeds = [record["tokens_per_second"] for record in run.metrics]
    figure.add_scatter(x=steps, y=speeds, name="tokens/s", line={"color": "#54a24b"}, row=1, col=3)
    for column, (metric, name) in enumerate({"mfu": "MFU", "goodput": "goodput", "data_share": "data wait"}.items(), 1):
        known = [record for record in run.metrics if metric in record]  # `mfu` needs a known peak
        x, y = [record["step"] for record in known], [record[metric] for record in known]
        figure.add_scatter(x=x, y=y, name=name, row=2, col=column)
        figure.update_yaxes(rangemode="tozero", tickformat=".1%", row=2, col=column)
    figure.update_xaxes(title_text="optimizer step", row=2)
    figure.update_yaxes(rangemode="tozero", row=1, col=3)
    figure.update_layout(template="plotly_white", height=720, legend={"orientation": "h", "y": -0.15})
    return figure


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
{curves}
{timeline}
<h2>What the model writes</h2>
<pre>{sample}</pre>
</body></html>
"""
