"""Reports a program's work: the set-up of logging, and JSON lines for machines."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**16
"""Bytes of a file that are read at a time from its end; Millrace writes lines of less than 10,000."""


def configure_logging(stage: str, *, rank: int | None = None, file: Path | None = None) -> None:
    """Send every logger's lines to stderr, or to `file`; ranks other than 0 report only warnings and errors."""
    where = stage if rank is None else f"{stage} rank={rank}"
    # It looks sys.stderr up for each line: a progress bar replaces that, and shows the line above itself.
    handler = logging.FileHandler(file, encoding="utf-8") if file else logging.lastResort
    assert handler
    handler.setLevel(logging.NOTSET)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {where} %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    logging.raiseExceptions = False  # a line that cannot be written, as on a full disk, is lost without a traceback
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("huggingface_hub").propagate = False  # once imported, it has a handler of its own
    logging.getLogger("services").setLevel(logging.INFO if not rank else logging.WARNING)


class JsonLines:
    """An append-only file with one JSON object a line. After a crash, a line is whole or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the complete lines of a JsonLines file, which may be absent; None for a line that is not an object."""
    try:
        with path.open("rb") as file:
            return [parse_json_line(line) for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


class JsonLinesTail:
    """Reads the records of a JsonLines file as they are appended, from the file's start or from its present end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._position = path, 0
        if from_end:
            with suppress(OSError):
                self._position = path.stat().st_size

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the complete records that were appended since the last call; none while the file cannot be read."""
        with suppress(OSError), self._path.open("rb") as file:
            self._position = min(self._position, file.seek(0, os.SEEK_END))  # a torn line may have been cut off
            file.seek(self._position)
            while (line := file.readline()).endswith(b"\n"):
                self._position = file.tell()
                if record := parse_json_line(line):
                    yield record


def read_last_json_line(path: Path) -> dict[str, Any] | None:
    """Return the newest complete record of a JsonLines file, which may be long; None where none can be read."""
    with suppress(OSError):
        return next(map(parse_json_line, islice(lines_from_end(path), 1, None)), None)
    return None


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield what is between the newlines of a file, the text after the last one first; nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        position, rest = file.seek(0, os.SEEK_END), b""
        while position:
            start = max(0, position - BLOCK_BYTES)
            file.seek(start)
            rest, *lines = (file.read(position - start) + rest).split(b"\n")
            yield from reversed(lines)
            position = start
        yield rest


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a JsonLines file; None where it is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def overwrite(path: Path, content: bytes, num_bytes: int) -> None:
    """Write `content`, padded to this size, in place: after the first time that needs no space on the disk."""
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        file = path.open("wb", buffering=0)
    with file:
        file.write(content.ljust(num_bytes - 1) + b"\n")


def _cut_torn_line(path: Path) -> None:
    """Drop the text after the last newline, which is a record that a killed writer did not finish."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - BLOCK_BYTES)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)
