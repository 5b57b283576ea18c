"""Reports a program's work: the set-up of logging, and JSON lines for machines."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from services.common.input.credentials import mask, mask_values
from services.common.input.files import open_for_append, open_regular_file, require_plain

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
    handler = _LogHandler(written)
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


class _LogHandler(logging.StreamHandler[TextIO]):
    """Writes log lines. A line that cannot be written, as on a full disk, is lost without a traceback of its own."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in logging
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


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


class JsonLinesTail:
    """Reads the records of a JsonLines file as they are appended, from the file's begin or from its present end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path, self._position = path, 0
        if from_end:
            with suppress(OSError):
                self._position = path.stat().st_size

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the complete records that were appended since the last call; none while the file cannot be read."""
        try:
            with io.BufferedReader(open_regular_file(self._path), _BLOCK_BYTES) as file:
                self._position = min(self._position, file.seek(0, os.SEEK_END))  # a torn line may have been cut off
                file.seek(self._position)
                for record in _parse_lines(file):
                    self._position = file.tell()
                    if record is not None:
                        yield record
        except OSError:  # there is no record yet, or the file system is away for a moment
            return


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
