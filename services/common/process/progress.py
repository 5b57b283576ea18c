"""Shows the progress of a long piece of work: a bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from services.common.process.progress_record import (
    ALREADY_PUBLISHED,
    PUBLISHED,
    ProgressRecord,
    measuring,
    report_advance,
)

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

PLAIN_PROGRESS_SECONDS = 10.0
NO_PROGRESS_SECONDS = 60.0
"""Seconds without an advance after which a line says so, or _SLOW_FACTOR times the median advance where that is longer.
"""
_PLAIN_LINE = re.compile(
    r"(?P<title>[a-z][a-z ]*): (?P<done>[0-9,]+)/(?P<total>[0-9,]+) (?P<unit>[A-Za-z][A-Za-z ]*)"
    r"(?:, (?P<note>.+?))??(?:, (?P<left>[0-9,]+) s left)?"
)
# Lines of the stages' commands. The trainer has a checkpoint collection instead of one artifact.
_PUBLISHED_LINE = re.compile(
    r"(?P<is_old>already published|the run is complete: [^/]*)|(?:published|trained to step [0-9,]+):?\s+(?=/)"
)
_SLOW_FACTOR = 5.0
_SAMPLE_SECONDS, _RATE_SAMPLES = 5.0, 60
"""Seconds between two samples of the rate, and their number: five minutes, or more where advances are slow."""


class Progress(Protocol):
    def advance_to(self, done: float, note: str = "") -> None: ...

    def wait(self) -> None:
        """Report that nothing was done since the last call. A caller that waits calls it every few seconds, so that a
        hang shows even before the first piece of work.
        """

    def start_again(self) -> None:
        """Begin another attempt, whose rate and time left count from its first piece of work."""


@contextmanager
def show_progress(title: str, total: float, unit: str) -> Iterator[Progress]:
    """Show a progress bar on a terminal, and elsewhere a plain line every ten seconds and at the end.

    Both show the time left at the rate of the last minutes or, in a hang, for how long nothing was done.
    """
    pace = _Pace(title, total, unit)
    with measuring(pace.measure):
        if not sys.stderr.isatty():
            plain = _PlainProgress(pace)
            yield plain
            plain.finish()
            return
        import rich.console  # noqa: PLC0415 - 0.03 s, which a command without a terminal saves
        import rich.progress  # noqa: PLC0415

        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit} {{task.fields[note]}}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[pace]}"),
        )
        with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bars:
            yield _BarProgress(bars, bars.add_task(title, total=total, note="", pace=pace), pace)


def parse_progress_line(stage: str, line: str) -> ProgressRecord | None:
    """Return the progress that a plain line of the stage reports; None for any other line of its log.

    Logs are the only channel from a stage on AWS Batch, or in a pod of a deployment, to the client.
    """
    found = _PLAIN_LINE.fullmatch(line.strip())
    if found is None:
        return None
    done, total, seconds_left = (_read_number(found[name]) for name in ("done", "total", "left"))
    return ProgressRecord(
        stage=stage,
        phase=found["title"],
        done=done or 0.0,
        total=total or 0.0,
        unit=found["unit"],
        seconds_left=seconds_left,
        note=found["note"] or "",
        time=time.time(),
    )


def parse_published_line(stage: str, line: str) -> ProgressRecord | None:
    """Return the record of a stage whose artifact is complete, if a line of its log says so, else None."""
    found = _PUBLISHED_LINE.match(line)
    if found is None:
        return None
    phase, (_, slash, folder) = ALREADY_PUBLISHED if found["is_old"] else PUBLISHED, line.strip().partition("/")
    return ProgressRecord(stage, phase, note=slash + folder, time=time.time())


def _read_number(text: str | None) -> float | None:
    return float(text.replace(",", "")) if text else None


class _Pace:
    """Measures the rate of work by the advances of the last minutes, and anew from the first advance after a hang.

    Another thread may ask for its text, such as the one that draws a terminal's bar.
    """

    def __init__(self, title: str, total: float, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.note = 0.0, ""
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_SAMPLES)
        """Time of an advance, and the amount done by then."""
        self._newest: tuple[float, float] | None = None
        self._gaps: deque[float] = deque(maxlen=_RATE_SAMPLES)
        """Seconds between two advances; their median ignores the one of a hang."""
        self._left_at: float | None = None
        self._changed_at = time.monotonic()

    def advance_to(self, done: float, note: str) -> None:
        self.note = note
        if done < self.done:  # lost work is done again
            self.start_again()
        is_news = done != self._newest[1] if self._newest else done != self._left_at
        self.done = done
        if not is_news:
            return
        now, has_hung = time.monotonic(), self.stalled_seconds is not None
        if self._newest:
            self._gaps.append(now - self._changed_at)
        if has_hung:
            self._forget()
        self._newest, self._changed_at = (now, done), now
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append(self._newest)

    def start_again(self) -> None:
        """Forget the rate. Until the new attempt's first advance, an amount may still be the last attempt's."""
        self._forget()
        self._left_at, self._changed_at = self.done, time.monotonic()

    @property
    def stalled_seconds(self) -> float | None:
        """Seconds without an advance in a hang; None outside of one."""
        seconds = time.monotonic() - self._changed_at
        is_over = self.done >= self.total
        gaps = list(self._gaps)
        expected = _SLOW_FACTOR * statistics.median(gaps) if gaps else 0.0
        return None if is_over or seconds < max(NO_PROGRESS_SECONDS, expected) else seconds

    @property
    def per_second(self) -> float | None:
        """Rate of the last minutes; None before there is one."""
        samples, newest = list(self._samples), self._newest
        if not newest or not samples:
            return None
        (began_at, begun_with), (now, done) = samples[0], newest
        return (done - begun_with) / (now - began_at) if done > begun_with and now > began_at else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at this rate; None in a hang, before there is a rate, and at the end."""
        rate = self.per_second
        is_known = rate and self.done < self.total and self.stalled_seconds is None
        return (self.total - self.done) / rate if rate and is_known else None

    def measure(self) -> ProgressRecord:
        return ProgressRecord(
            "", self.title, self.done, self.total, self.unit, self.per_second, self.seconds_left, self.note
        )

    def __str__(self) -> str:
        """Return the seconds left or, in a hang, its length; empty before there is a rate."""
        if (stalled_seconds := self.stalled_seconds) is not None:
            return f"no {self.unit} for {stalled_seconds:,.0f} s"
        seconds_left = self.seconds_left
        return "" if seconds_left is None else f"{seconds_left:,.0f} s left"

    def _forget(self) -> None:
        self._samples.clear()
        self._newest = None


class _BarProgress:
    def __init__(self, bars: Bars, task: TaskID, pace: _Pace) -> None:
        self._bars, self._task, self._pace = bars, task, pace

    def advance_to(self, done: float, note: str = "") -> None:
        self._pace.advance_to(done, note)
        self._bars.update(self._task, completed=done, note=note)
        report_advance()

    def wait(self) -> None:
        """Report only the record: the bar is redrawn all the time, with its pace."""
        report_advance()

    def start_again(self) -> None:
        self._pace.start_again()


class _PlainProgress:
    def __init__(self, pace: _Pace) -> None:
        self._pace = pace
        self._printed: tuple[float, str] | None = None
        self._printed_at = time.monotonic()
        self._is_hang_printed = False

    def advance_to(self, done: float, note: str = "") -> None:
        self._pace.advance_to(done, note)
        if self._is_due():
            self._print()
        report_advance()

    def wait(self) -> None:
        if self._pace.stalled_seconds is not None and self._is_due():
            self._print()
        report_advance()

    def _is_due(self) -> bool:
        """Tell whether a line is due: every ten seconds, or every minute once a hang was reported."""
        is_known = self._is_hang_printed and self._pace.stalled_seconds is not None
        return time.monotonic() - self._printed_at >= (NO_PROGRESS_SECONDS if is_known else PLAIN_PROGRESS_SECONDS)

    def start_again(self) -> None:
        self._pace.start_again()

    def finish(self) -> None:
        if self._state != self._printed:
            self._print()

    @property
    def _state(self) -> tuple[float, str]:
        return self._pace.done, self._pace.note

    def _print(self) -> None:
        pace = self._pace
        parts = [f"{pace.title}: {pace.done:,.0f}/{pace.total:,.0f} {pace.unit}", pace.note, str(pace)]
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
        self._printed, self._printed_at = self._state, time.monotonic()
        self._is_hang_printed = pace.stalled_seconds is not None
