"""What a program says while it works: one logging set-up, JSON lines for machines, progress for people."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import rich.console
import rich.progress

PLAIN_PROGRESS_SECONDS = 10.0
_LAST_LINE_BYTES = 16_384


def configure_logging(stage: str, *, rank: int | None = None, file: Path | None = None) -> None:
    """Send every logger's lines to stderr, or to `file`; ranks other than 0 report warnings and errors alone."""
    where = stage if rank is None else f"{stage} rank={rank}"
    handler: logging.Handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {where} %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    level = logging.INFO if not rank else logging.WARNING
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("services").setLevel(level)


class JsonLines:
    """An append-only file of one JSON object a line; a line is whole or absent after a crash."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """The complete lines of a JsonLines file, None for each that is not a JSON object; none when it does not exist."""
    if not path.exists():
        return []
    return [_parse_object(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_last_json_line(path: Path) -> dict[str, Any] | None:
    """The newest complete record of a JsonLines file that may be long; None when there is none that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    return _parse_object(lines[-2]) if len(lines) > 1 else None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Progress(Protocol):
    def advance_to(self, done: float, note: str = "") -> None: ...

    def start_again(self) -> None:
        """What comes is another attempt's, at a rate of its own: the time left counts from its first piece."""


@contextmanager
def show_progress(title: str, total: float, unit: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a plain line every ten seconds and at the end."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        plain = _PlainProgress(title, total, unit)
        yield plain
        plain.finish()
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit} {{task.fields[note]}}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console) as bars:
        yield _BarProgress(bars, bars.add_task(title, total=total, note=""))


class _BarProgress:
    def __init__(self, bars: rich.progress.Progress, task: rich.progress.TaskID) -> None:
        self._bars, self._task = bars, task

    def advance_to(self, done: float, note: str = "") -> None:
        self._bars.update(self._task, completed=done, note=note)

    def start_again(self) -> None:
        """Rich's estimate forgets by itself: it counts the last half minute that something was done in."""


class _PlainProgress:
    def __init__(self, title: str, total: float, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._first: tuple[float, float] | None = None
        self._left_at: float | None = None
        self._state: tuple[float, str] = (0.0, "")
        self._printed: tuple[float, str] | None = None
        self._printed_at = time.monotonic()

    def advance_to(self, done: float, note: str = "") -> None:
        if done < self._state[0]:  # work that was lost is done again
            self.start_again()
        self._state = (done, note)
        if self._first is None and done != self._left_at:
            self._first = (time.monotonic(), done)
        if time.monotonic() - self._printed_at >= PLAIN_PROGRESS_SECONDS:
            self._print()

    def start_again(self) -> None:
        """Until the first piece of the new attempt, what is seen may still be the last piece of the one before."""
        self._first, self._left_at = None, self._state[0]

    def _remaining(self, done: float) -> str:
        """By the rate since the first piece was done: what came before it, such as starting workers, comes once."""
        began_at, begun_with = self._first or (0.0, done)
        if not begun_with < done < self._total:
            return ""
        seconds = (time.monotonic() - began_at) * (self._total - done) / (done - begun_with)
        return f"{seconds:,.0f} s left"

    def finish(self) -> None:
        if self._state != self._printed:
            self._print()

    def _print(self) -> None:
        done, note = self._state
        parts = [f"{self._title}: {done:,.0f}/{self._total:,.0f} {self._unit}", note, self._remaining(done)]
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
        self._printed, self._printed_at = self._state, time.monotonic()


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline: a record that a killed writer did not finish."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
