"""Shows the progress of long work: a bar on a terminal, and plain lines elsewhere, which other programs read again.

`current_progress` is the progress of the process's stage, for its metrics.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

PROGRESS_SECONDS_VARIABLE = "MILLRACE_PROGRESS_SECONDS"
STARTING = "starting"
PLAIN_PROGRESS_SECONDS = 10.0
"""Seconds between two plain lines, where MILLRACE_PROGRESS_SECONDS names no other."""
NO_PROGRESS_SECONDS = 60.0
"""Seconds without an advance after which a line says so, or _SLOW_FACTOR times the mean where that is longer."""
_SLOW_FACTOR = 5.0
_RATE_SECONDS = 600.0
"""Seconds of the past over which the rate is measured."""
_UNITS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"), (1, "s", 1, "s"))
_PLAIN_LINE = re.compile(
    r"(?P<title>[a-z][a-z ]*): (?P<done>[0-9,]+)/(?P<total>[0-9,]+) (?P<unit>[A-Za-z][A-Za-z ]*)"
    r"(?:, (?P<note>.+?))??(?:, (?P<left>[0-9,]+) s left)?"
)
# Lines of the stages' commands. The trainer has a checkpoint collection instead of one artifact.
_PUBLISHED_LINE = re.compile(
    r"(?P<is_old>already published|the run is complete: [^/]*)|(?:published|trained to step [0-9,]+):?\s+(?=/)"
)


@dataclass(frozen=True)
class ProgressRecord:
    """The progress of a stage at one time."""

    stage: str
    phase: str
    """Name of the present piece of work, such as `encode`; STARTING before the first and after the last."""
    done: float = 0.0
    total: float = 0.0
    """Amount of work in the phase, in `unit`; 0 where the phase is not measured."""
    unit: str = ""
    per_second: float | None = None
    """Rate of the last minutes; None before it is known."""
    seconds_left: float | None = None
    """Seconds until the end of the phase at this rate; None before it is known, and in a hang."""
    note: str = ""
    """Further text for people, such as the loss."""
    time: float = field(default_factory=time.time)
    """Time of the record in seconds since 1970."""


Measure = Callable[[], ProgressRecord]
"""Returns the present progress of a phase, without the stage."""


@contextmanager
def show_progress(title: str, total: float, unit: str) -> Iterator[Progress]:
    """Show a progress bar on a terminal, and elsewhere a plain line every few seconds and at the end.

    Both show the time left at the rate of the last minutes or, in a hang, for how long nothing was done.
    """
    progress = Progress(title, total, unit)
    with _reporter.measuring(progress.measure), progress.bars:
        yield progress
        progress.finish()


class Progress:
    """The progress of one piece of work."""

    def __init__(self, title: str, total: float, unit: str) -> None:
        from rich.console import Console  # noqa: PLC0415 - 0.03 s, which a command saves until its work starts
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.progress import Progress as Bars  # noqa: PLC0415

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit} {{task.fields[note]}}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[progress].pace}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            speed_estimate_period=_RATE_SECONDS,
            get_time=time.monotonic,
        )
        self._id = self.bars.add_task(title, total=total, note="", progress=self)
        self._task, self._total, self._unit = self.bars.tasks[0], total, unit
        self._print_seconds = float(os.environ.get(PROGRESS_SECONDS_VARIABLE) or PLAIN_PROGRESS_SECONDS)
        self._changed_at = self._printed_at = time.monotonic()
        self._printed: tuple[float, str] | None = None

    def advance_to(self, done: float, note: str = "") -> None:
        """Set the amount that is done. A smaller amount than before starts another attempt."""
        if done < self._task.completed:
            self.start_again(done)
        elif done > self._task.completed:
            self._changed_at = time.monotonic()
        self.bars.update(self._id, completed=done, note=note)
        self._print_if_due()

    def wait(self, phase: str = "") -> None:
        """Report every few seconds that nothing was done, so that a hang shows even before the first piece of work, or
        that another piece of work goes on.
        """
        self.bars.update(self._id, note=phase or self._task.fields["note"])  # forgets a rate that is long past
        if phase or self.stalled_seconds is not None:
            self._print_if_due()

    def start_again(self, done: float | None = None) -> None:
        """Begin another attempt, whose rate and time left count from its first piece of work."""
        self.bars.reset(self._id, completed=int(self._task.completed if done is None else done))
        self._changed_at = time.monotonic()

    def finish(self) -> None:
        if (self._task.completed, self._task.fields["note"]) != self._printed:
            self._print()

    @property
    def stalled_seconds(self) -> float | None:
        """Seconds without an advance in a hang; None outside of one."""
        seconds, speed = time.monotonic() - self._changed_at, self._task.speed
        expected = max(NO_PROGRESS_SECONDS, _SLOW_FACTOR / speed if speed else 0.0)
        return seconds if self._task.completed < self._total and seconds >= expected else None

    @property
    def seconds_left(self) -> float | None:
        left, speed = self._total - self._task.completed, self._task.speed
        return left / speed if speed and left > 0 and self.stalled_seconds is None else None

    @property
    def pace(self) -> str:
        """The seconds left or, in a hang, its length; empty before there is a rate."""
        if (stalled_seconds := self.stalled_seconds) is not None:
            return f"no {self._unit} for {stalled_seconds:,.0f} s"
        return "" if self.seconds_left is None else f"{self.seconds_left:,.0f} s left"

    def measure(self) -> ProgressRecord:
        task = self._task
        amounts = (task.completed, self._total, self._unit, task.speed, self.seconds_left)
        return ProgressRecord("", task.description, *amounts, note=task.fields["note"])

    def _print_if_due(self) -> None:
        """Print a line every few seconds, or every minute once a hang was printed."""
        is_hang_printed = self._printed_at - self._changed_at >= NO_PROGRESS_SECONDS
        if time.monotonic() - self._printed_at >= (NO_PROGRESS_SECONDS if is_hang_printed else self._print_seconds):
            self._print()

    def _print(self) -> None:
        done, note = self._task.completed, self._task.fields["note"]
        self._printed, self._printed_at = (done, note), time.monotonic()
        if self.bars.disable:  # no terminal
            amount = f"{self._task.description}: {done:,.0f}/{self._total:,.0f} {self._unit}"
            print(", ".join(filter(None, [amount, note, self.pace])), file=sys.stderr, flush=True)


def parse_progress_line(stage: str, line: str) -> ProgressRecord | None:
    """Return the progress that a plain line of the stage reports; None for any other line of its log.

    A log is the only channel from a stage, on any target, to who follows it.
    """
    found = _PLAIN_LINE.fullmatch(line.strip())
    if found is None:
        return None
    done, total, left = (float((found[name] or "nan").replace(",", "")) for name in ("done", "total", "left"))
    seconds_left = None if math.isnan(left) else left
    return ProgressRecord(stage, found["title"], done, total, found["unit"], None, seconds_left, found["note"] or "")


def parse_published_line(line: str) -> tuple[str, bool] | None:
    """Return the folder of the artifact that a line of a log calls complete, and whether it is new; else None."""
    found = _PUBLISHED_LINE.match(line)
    if found is None:
        return None
    _, slash, folder = line.strip().partition("/")
    return slash + folder, not found["is_old"]


@contextmanager
def reporting_progress(stage: str) -> Iterator[None]:
    """Report the progress of `stage` during the block, which is the stage's whole command."""
    global _reporter  # noqa: PLW0603 - a process runs one stage
    before, _reporter = _reporter, _Reporter(stage)
    try:
        yield
    finally:
        _reporter = before


def report_phase(name: str) -> AbstractContextManager[None]:
    """Report a phase whose amount of work is not measured, during the block."""
    return _reporter.measuring(lambda: ProgressRecord("", name))


def current_progress() -> ProgressRecord | None:
    """Return the present progress of this process's stage, from any thread; None where it runs no stage."""
    return _reporter.measure() if _reporter.stage else None


def write_duration(seconds: float) -> str:
    """Write a duration in its two largest units, such as 3 d 4 h, 12 min 5 s or 0.35 s."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds else "0 s"
    rest = round(seconds)
    size, unit, smaller, smaller_unit = next(each for each in _UNITS if rest >= each[0])
    return f"{rest // size} {unit}" + (f" {rest % size // smaller} {smaller_unit}" if rest % size else "")


class _Reporter:
    """Holds the nested phases of a stage; the innermost one's progress is the stage's."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._measures: list[Measure] = [lambda: ProgressRecord("", STARTING)]

    def measure(self) -> ProgressRecord:
        return replace(self._measures[-1](), stage=self.stage)

    @contextmanager
    def measuring(self, measure: Measure) -> Iterator[None]:
        """Report what `measure` returns, during the block."""
        self._measures.append(measure)
        try:
            yield
        finally:
            self._measures.pop()


_reporter = _Reporter("")
