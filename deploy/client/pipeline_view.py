"""Shows the stages of a pipeline on any target: one table that is redrawn on a terminal, and plain lines elsewhere.

The table has the state, progress, time left, time and cost of every stage. Lines of the stages' logs are printed above
it, except for their progress, which the table shows. Without a terminal, and where CI or TERM=dumb is set, all their
lines are printed, and one for every change of a state.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.exit_codes import EXIT_AGAIN
from services.common.errors import EXIT_INTERRUPTED
from services.common.process.progress import (
    ProgressRecord,
    parse_progress_line,
    parse_published_line,
    write_duration,
)

State = Literal["waiting", "running", "published", "skipped", "failed", "stopped"]
DONE = ("published", "skipped")
BAR_CHARACTERS = 12
LEAST_BAR_COLUMNS = 100
"""Columns of the narrowest terminal that shows bars; a narrower one needs the space for the progress in words."""
STYLES = {"waiting": "dim", "running": "bold", "failed": "bold red", "stopped": "yellow"} | dict.fromkeys(DONE, "green")


@dataclass
class _Row:
    """A stage of the pipeline, as the table shows it."""

    state: State = "waiting"
    detail: str = ""
    """Reason of the state, such as the stage before, or the folder of the artifact."""
    progress: ProgressRecord | None = None
    artifact: tuple[str, bool] | None = None
    """Folder of the published artifact, and whether the stage has made it; None before its log says so."""
    began_at: float | None = None
    seconds: float = 0.0
    """Seconds for which the stage ran, without the time since `began_at`."""
    dollars_per_hour: float | None = None
    """Price of all nodes of the stage; None where there is no price."""

    @property
    def total_seconds(self) -> float:
        return self.seconds + (time.monotonic() - self.began_at if self.began_at is not None else 0.0)

    @property
    def dollars(self) -> float | None:
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.total_seconds / 3600

    def cells(self) -> tuple[str, str, str, str]:
        """Progress, time left of the present phase, time and cost; empty where they are not known."""
        record, left, words = self.progress, "", self.detail
        if self.state == "running" and record:
            amounts = f"{record.done:,.0f}/{record.total:,.0f} {record.unit}" if record.total else ""
            words = ", ".join(filter(None, (f"{record.phase} {amounts}".strip(), record.note)))
            if record.seconds_left is not None:
                left = write_duration(round(max(0.0, record.seconds_left - max(0.0, time.time() - record.time))))
        cost = "" if self.dollars is None else f"${self.dollars:,.2f}"
        return words, left, write_duration(round(self.total_seconds)), cost

    def draw_bar(self) -> ProgressBar | str:
        total, completed = (self.progress.total, self.progress.done) if self.progress else (0.0, 0.0)
        if self.state in DONE:
            total = completed = 1.0
        if not total and self.state != "running":
            return ""
        return ProgressBar(total=total or None, completed=completed, width=BAR_CHARACTERS)


class PipelineView:
    """Shows the stages `stages` in the block that it manages. Its methods may be called from any thread."""

    def __init__(self, stages: Sequence[str], repetition: str = "", prices: str = "") -> None:
        """`repetition` is the command that continues the pipeline; it is printed where the pipeline ends early.

        `prices` names the table of prices, its region and date, for targets whose stages cost something.
        """
        self._rows = {stage: _Row() for stage in stages}
        self._repetition, self._prices = repetition, prices
        self._console = Console()
        self._live = Live(get_renderable=self._draw, console=self._console)
        # A terminal whose lines can be redrawn, and no log of CI.
        self.is_live = self._console.is_terminal and not self._console.is_dumb_terminal and not os.environ.get("CI")
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        if self.is_live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_live:
            self._live.stop()
        else:
            ends = [f"{stage} {row.state} in {row.cells()[2]}" for stage, row in self._rows.items()]
            self._say("; ".join(ends + self._total()))
        is_done = all(row.state in DONE for row in self._rows.values())
        has_advice = error is not None and not isinstance(error, KeyboardInterrupt)
        if self._repetition and not is_done and not has_advice:
            _print(f"Published artifacts and checkpoints stay. Continue with: {self._repetition}", sys.stderr)

    def wait(self, stage: str, reason: str) -> None:
        """Show why a stage does not run yet, or not any more for now."""
        self._change(stage, "waiting", reason)

    def begin(
        self, stage: str, detail: str = "", dollars_per_hour: float | None = None, since: datetime | None = None
    ) -> None:
        """Show a stage as running. Its time and cost count from `since`, or from the first call."""
        row = self._rows[stage]
        with self._lock:
            row.dollars_per_hour = dollars_per_hour
            if row.began_at is None:
                age_seconds = max(0.0, (datetime.now(UTC) - since).total_seconds()) if since else 0.0
                row.began_at = time.monotonic() - age_seconds
        self._change(stage, "running", detail)

    def skip(self, stage: str, detail: str) -> None:
        """Show a stage as skipped, because its artifact is published already."""
        self._change(stage, "skipped", detail)

    def end(self, stage: str, exit_code: int, reason: str = "") -> None:
        """Show the end of a stage. A stage that has found its artifact published counts as skipped."""
        folder, is_new = self._rows[stage].artifact or (reason, True)
        if exit_code == 0 and not is_new:
            self.skip(stage, f"already published: {folder}")
        elif exit_code == 0:
            self._change(stage, "published", folder)
        else:
            state: State = "stopped" if exit_code in (EXIT_AGAIN, EXIT_INTERRUPTED) else "failed"
            self._change(stage, state, f"exit code {exit_code}{f': {reason}' if reason else ''}")

    def folder_of(self, stage: str) -> str:
        """Return the folder of the artifact that a stage has made or found; empty before its log says so."""
        artifact = self._rows[stage].artifact
        return artifact[0] if artifact else ""

    def take_line(self, stage: str, line: str, output: TextIO | None = None) -> None:
        """Print a line of a stage's log to `output`, by default stdout; the table shows a line of its progress."""
        row, progress = self._rows[stage], parse_progress_line(stage, line)
        row.progress = progress or row.progress
        row.artifact = parse_published_line(line) or row.artifact
        if not self.is_live:
            _print(line, output or sys.stdout)
        elif not progress:
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _change(self, stage: str, state: State, detail: str) -> None:
        with self._lock:
            row = self._rows[stage]
            if state != "running":
                row.seconds, row.began_at = row.total_seconds, None
            if (row.state, row.detail) == (state, detail):
                return
            row.state, row.detail = state, detail
        if not self.is_live:
            self._say(f"{stage}: {state}{f', {detail}' if detail else ''}")

    def _say(self, text: str) -> None:
        _print(f"pipeline: {text}", sys.stdout)

    def _total(self) -> list[str]:
        dollars = [row.dollars for row in self._rows.values() if row.dollars is not None]
        return [f"${sum(dollars):,.2f} so far ({self._prices})"] if dollars else []

    def _draw(self) -> Table:
        has_bar = self._console.width >= LEAST_BAR_COLUMNS
        has_cost = any(row.dollars_per_hour is not None for row in self._rows.values())
        table = Table(expand=True, caption="; ".join(self._total()) or None, caption_justify="left")
        for title in ("stage", "state", *([""] if has_bar else [])):
            table.add_column(title, no_wrap=True)
        table.add_column("progress", ratio=1, no_wrap=True, overflow="ellipsis")
        for title in ("left", "time", *(["cost"] if has_cost else [])):
            table.add_column(title, justify="right", no_wrap=True)
        for stage, row in self._rows.items():
            words, left, seconds, cost = row.cells()
            first: list[RenderableType] = [stage, Text(row.state, style=STYLES[row.state])]
            first += [row.draw_bar()] if has_bar else []
            # As text: rich would read [notify] as markup.
            table.add_row(*first, Text(words), left, seconds, *([cost] if has_cost else []))
        return table


def _print(line: str, output: TextIO) -> None:
    """Print a line. An output whose reader has gone takes no further lines, and the pipeline goes on."""
    try:
        print(line, file=output, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output.fileno())
        os.close(nowhere)
