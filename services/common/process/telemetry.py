"""Reports a program's work: the set-up of logging, JSON lines for machines, and progress for people."""

from __future__ import annotations

import io
import json
import logging
import os
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

import rich.console
import rich.progress

from services.common.input.credentials import mask, mask_values
from services.common.input.files import open_for_append, open_regular_file, require_plain

PLAIN_PROGRESS_SECONDS = 10.0
NO_PROGRESS_SECONDS = 60.0
"""Seconds without an advance after which a line says so, or _SLOW_FACTOR times the median advance where that is longer.
"""
_SLOW_FACTOR = 5.0
_SAMPLE_SECONDS, _RATE_SAMPLES = 5.0, 60
"""Seconds between two samples of the rate, and their number: five minutes, or more where advances are slow."""
_LAST_LINE_BYTES = 16_384
_MAX_LINE_BYTES = 2**20
"""Bytes of the longest line of JSON that is read; Millrace writes lines of less than 10,000."""
_BLOCK_BYTES = 2**16


def configure_logging(stage: str, *, rank: int | None = None, file: Path | None = None) -> None:
    """Send every logger's lines to stderr, or to `file`; ranks other than 0 report only warnings and errors.

    Credentials are masked in the lines of all libraries.
    """
    logging.setLogRecordFactory(_make_masked_record)
    where = stage if rank is None else f"{stage} rank={rank}"
    written = io.TextIOWrapper(open_for_append(file), encoding="utf-8", line_buffering=True) if file else sys.stderr
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {where} %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    level = logging.INFO if not rank else logging.WARNING
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("services").setLevel(level)


def _make_masked_record(*arguments: Any, **options: Any) -> logging.LogRecord:
    """Make a log record with masked credentials, because libraries log addresses as they are, and some have handlers of
    their own.
    """
    record = logging.LogRecord(*arguments, **options)
    record.msg, record.args = mask(record.getMessage()), None
    if record.exc_info:
        record.exc_text = mask("".join(traceback.format_exception(*record.exc_info)).rstrip())
    return record


class JsonLines:
    """An append-only file with one JSON object a line. After a crash, a line is whole or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file: TextIO = io.TextIOWrapper(open_for_append(path), encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(mask_values(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the complete lines of a JsonLines file, which may be absent; None stands for a line that is not an object.

    Raises `InputFileError` where something else than a file is in its place.
    """
    try:
        with io.BufferedReader(open_regular_file(path), _BLOCK_BYTES) as file:
            return list(_parse_lines(file))
    except FileNotFoundError:
        return []


def _parse_lines(file: BinaryIO) -> Iterator[dict[str, Any] | None]:
    while line := file.readline(_MAX_LINE_BYTES):
        is_whole = True
        while not line.endswith(b"\n"):
            more = file.readline(_MAX_LINE_BYTES)
            if not more:
                return
            is_whole, line = False, more
        yield parse_json_line(line) if is_whole else None


def read_last_json_line(path: Path) -> dict[str, Any] | None:
    """Return the newest complete record of a JsonLines file, which may be long; None where none can be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    return parse_json_line(lines[-2]) if len(lines) > 1 else None


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a JsonLines file; None where it is not a JSON object, or holds text that cannot be printed."""
    try:
        record = json.loads(line)
        require_plain(record)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


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
    console = rich.console.Console(stderr=True)
    pace = _Pace(total, unit)
    if not console.is_terminal:
        plain = _PlainProgress(title, total, unit, pace)
        yield plain
        plain.finish()
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit} {{task.fields[note]}}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[pace]}"),
    )
    with rich.progress.Progress(*columns, console=console) as bars:
        yield _BarProgress(bars, bars.add_task(title, total=total, note="", pace=pace), pace)


class _Pace:
    """Measures the rate of work by the advances of the last minutes, and anew from the first advance after a hang.

    Another thread may ask for its text, such as the one that draws a terminal's bar.
    """

    def __init__(self, total: float, unit: str) -> None:
        self._total, self._unit = total, unit
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_SAMPLES)
        """Time of an advance, and the amount done by then."""
        self._newest: tuple[float, float] | None = None
        self._gaps: deque[float] = deque(maxlen=_RATE_SAMPLES)
        """Seconds between two advances; their median ignores the one of a hang."""
        self._left_at: float | None = None
        self._done = 0.0
        self._changed_at = time.monotonic()

    def advance_to(self, done: float) -> None:
        if done < self._done:  # lost work is done again
            self.start_again()
        is_news = done != self._newest[1] if self._newest else done != self._left_at
        self._done = done
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
        self._left_at, self._changed_at = self._done, time.monotonic()

    @property
    def stalled_seconds(self) -> float | None:
        """Seconds without an advance in a hang; None outside of one."""
        seconds = time.monotonic() - self._changed_at
        is_over = self._done >= self._total
        gaps = list(self._gaps)
        expected = _SLOW_FACTOR * statistics.median(gaps) if gaps else 0.0
        return None if is_over or seconds < max(NO_PROGRESS_SECONDS, expected) else seconds

    def __str__(self) -> str:
        """Return the seconds left or, in a hang, its length; empty before there is a rate."""
        stalled_seconds = self.stalled_seconds
        if stalled_seconds is not None:
            return f"no {self._unit} for {stalled_seconds:,.0f} s"
        samples, newest = list(self._samples), self._newest
        if not newest or not samples:
            return ""
        (began_at, begun_with), (now, done) = samples[0], newest
        if not begun_with < done < self._total:
            return ""
        return f"{(now - began_at) * (self._total - done) / (done - begun_with):,.0f} s left"

    def _forget(self) -> None:
        self._samples.clear()
        self._newest = None


class _BarProgress:
    def __init__(self, bars: rich.progress.Progress, task: rich.progress.TaskID, pace: _Pace) -> None:
        self._bars, self._task, self._pace = bars, task, pace

    def advance_to(self, done: float, note: str = "") -> None:
        self._pace.advance_to(done)
        self._bars.update(self._task, completed=done, note=note)

    def wait(self) -> None:
        """Do nothing: the bar is redrawn all the time, with its pace."""

    def start_again(self) -> None:
        self._pace.start_again()


class _PlainProgress:
    def __init__(self, title: str, total: float, unit: str, pace: _Pace) -> None:
        self._title, self._total, self._unit, self._pace = title, total, unit, pace
        self._state: tuple[float, str] = (0.0, "")
        self._printed: tuple[float, str] | None = None
        self._printed_at = time.monotonic()
        self._is_hang_printed = False

    def advance_to(self, done: float, note: str = "") -> None:
        self._pace.advance_to(done)
        self._state = (done, note)
        if self._is_due():
            self._print()

    def wait(self) -> None:
        if self._pace.stalled_seconds is not None and self._is_due():
            self._print()

    def _is_due(self) -> bool:
        """Tell whether a line is due: every ten seconds, or every minute once a hang was reported."""
        is_known = self._is_hang_printed and self._pace.stalled_seconds is not None
        return time.monotonic() - self._printed_at >= (NO_PROGRESS_SECONDS if is_known else PLAIN_PROGRESS_SECONDS)

    def start_again(self) -> None:
        self._pace.start_again()

    def finish(self) -> None:
        if self._state != self._printed:
            self._print()

    def _print(self) -> None:
        done, note = self._state
        parts = [f"{self._title}: {done:,.0f}/{self._total:,.0f} {self._unit}", note, str(self._pace)]
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
        self._printed, self._printed_at = self._state, time.monotonic()
        self._is_hang_printed = self._pace.stalled_seconds is not None


def _cut_torn_line(path: Path) -> None:
    """Drop the text after the last newline, which is a record that a killed writer did not finish."""
    try:
        file = open_regular_file(path)
    except OSError:  # there is no file, or `open_for_append` explains what is in its place
        return
    with file:
        end = position = file.seek(0, os.SEEK_END)
        whole = 0
        while position and not whole:
            position = max(0, position - _BLOCK_BYTES)
            file.seek(position)
            if found := file.read(min(_BLOCK_BYTES, end - position)).rfind(b"\n") + 1:
                whole = position + found
    if whole < end:
        os.truncate(path, whole)
