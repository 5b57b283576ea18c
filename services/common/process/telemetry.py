"""What a program says while it works: one logging set-up, JSON lines for machines, progress for people."""

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
"""Seconds without an advance after which a line says so; _SLOW_FACTOR times as long as an advance takes, where that is
longer."""
_SLOW_FACTOR = 5.0
_SAMPLE_SECONDS, _RATE_SAMPLES = 5.0, 60
"""The rate is counted over samples so many seconds apart, and over so many: five minutes, or more where advances are
slow."""
_LAST_LINE_BYTES = 16_384
_MAX_LINE_BYTES = 2**20
"""Bytes of the longest line of JSON that is read: ours have under 10,000."""
_BLOCK_BYTES = 2**16


def configure_logging(stage: str, *, rank: int | None = None, file: Path | None = None) -> None:
    """Send every logger's lines to stderr, or to `file`; ranks other than 0 report warnings and errors alone.

    Credentials in them are masked, whoever writes them.
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
    """A record whose line and traceback have no credentials: libraries log addresses as they are, and some of them have
    handlers of their own.
    """
    record = logging.LogRecord(*arguments, **options)
    record.msg, record.args = mask(record.getMessage()), None
    if record.exc_info:
        record.exc_text = mask("".join(traceback.format_exception(*record.exc_info)).rstrip())
    return record


class JsonLines:
    """An append-only file of one JSON object a line; a line is whole or absent after a crash."""

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
    """The complete lines of a JsonLines file, None for each that is not a JSON object; none when it does not exist.

    Raises `InputFileError` when something else than a file is there.
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
    """The newest complete record of a JsonLines file that may be long; None when there is none that can be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    return parse_json_line(lines[-2]) if len(lines) > 1 else None


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The object of a JsonLines file's line; None for what is none, or nothing that could be shown to a person."""
    try:
        record = json.loads(line)
        require_plain(record)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Progress(Protocol):
    def advance_to(self, done: float, note: str = "") -> None: ...

    def wait(self) -> None:
        """Tell that nothing was done since the last call. A caller that has to wait calls it every few seconds, so that
        a hang is seen also before the first piece.
        """

    def start_again(self) -> None:
        """What comes is another attempt's, at a rate of its own: the time left counts from its first piece."""


@contextmanager
def show_progress(title: str, total: float, unit: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a plain line every ten seconds and at the end.

    Both say how much time is left at the rate of the last minutes, and instead of it, where nothing is done for long,
    for how long.
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
    """How fast something is done, by the advances of the last minutes. A time in which it hung counts for nothing: the
    rate is counted anew from the first advance after it.

    Its text may be asked for by another thread, as the one that draws a terminal's bar.
    """

    def __init__(self, total: float, unit: str) -> None:
        self._total, self._unit = total, unit
        self._samples: deque[tuple[float, float]] = deque(maxlen=_RATE_SAMPLES)
        """When an advance was seen, and how much was done then."""
        self._newest: tuple[float, float] | None = None
        self._gaps: deque[float] = deque(maxlen=_RATE_SAMPLES)
        """Seconds between two advances. A hang is one of many, which their median forgets."""
        self._left_at: float | None = None
        self._done = 0.0
        self._changed_at = time.monotonic()

    def advance_to(self, done: float) -> None:
        if done < self._done:  # work that was lost is done again
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
        """Until the first piece of the new attempt, what is seen may still be the last piece of the one before."""
        self._forget()
        self._left_at, self._changed_at = self._done, time.monotonic()

    @property
    def stalled_seconds(self) -> float | None:
        """Seconds without an advance, where that is longer than the advances before let expect."""
        seconds = time.monotonic() - self._changed_at
        is_over = self._done >= self._total
        gaps = list(self._gaps)
        expected = _SLOW_FACTOR * statistics.median(gaps) if gaps else 0.0
        return None if is_over or seconds < max(NO_PROGRESS_SECONDS, expected) else seconds

    def __str__(self) -> str:
        """Seconds that are left; or for how long nothing was done; or nothing, before there is a rate."""
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
        """The bar is drawn again and again, with the pace as it is then."""

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
        """A hang is said once it is one, and then every minute."""
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
    """Drop what follows the last newline: a record that a killed writer did not finish."""
    try:
        file = open_regular_file(path)
    except OSError:  # there is none, or `open_for_append` says what is there
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
