"""Draws how long the phases of the three stages took, as bars that need no script."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from services.common.artifacts.manifest import Phase
from services.common.process.duration import write_duration
from services.trainer.report.page import make_details, make_table

_MOST_PARTS = 60
"""Parts of a bar at most; the last part holds the rest of a run of more starts."""


def draw_timeline(phases: Mapping[str, Sequence[Phase]]) -> str:
    """Return a bar for each stage, as long as its share of all work, and a table of the phases.

    Below a bar, phases of one name are one sum: a run that was started often has many. The time between stages, which
    may be days, is left out. Empty if no stage has a phase.
    """
    total = sum(phase.seconds for each in phases.values() for phase in each)
    if not total:
        return ""
    bars, begin = [], 0.0
    for number, (stage, each) in enumerate(phases.items()):
        seconds = sum(phase.seconds for phase in each)
        if not each:
            continue
        shown = list(each[: _MOST_PARTS - 1])
        parts = [phase.seconds for phase in shown]
        if len(each) > len(shown):
            parts.append(sum(phase.seconds for phase in each[len(shown) :]))
        spans = "".join(f'<span style="width:{100 * part / total:.4g}%"></span>' for part in parts)
        sums: dict[str, float] = {}
        for phase in each:
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
        names = ", ".join(f"{name} {write_duration(part)}" for name, part in sums.items())
        bars.append(
            f'<span>{html.escape(stage)}</span><div class="lane c{number}" aria-hidden="true">'
            f'<span style="width:{100 * begin / total:.4g}%;background:none;border:0;opacity:1"></span>{spans}</div>'
            f'<p class="when">{html.escape(f"{write_duration(seconds)}: {names}")}</p>'
        )
        begin += seconds
    rows = [
        (stage, phase.name, f"{phase.started_at:%Y-%m-%d %H:%M:%S}", write_duration(phase.seconds))
        for stage, each in phases.items()
        for phase in each[-_MOST_PARTS:]
    ]
    table = make_table("Phases of the stages", ("stage", "phase", "began (UTC)", "took"), rows)
    return f'<div class="lanes">{"".join(bars)}</div>{make_details("All phases", table)}'
