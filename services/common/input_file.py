"""Files that other programs and people write: opened only where they are regular, parsed only as far as is sane."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Of tables in tables. What reads and writes such values calls itself for each, and Python allows about 1,000 calls."""
MAX_INTEGER_BITS = 1_023
"""Larger ones have no float. Python refuses to print integers of more than 4,300 digits."""


def open_regular_file(path: Path) -> io.FileIO:
    """Open for reading, without a buffer. Raises `OSError`, also where `path` cannot be a name or is no regular file.

    A pipe without a writer would be waited for without end, and a device may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL, or half of a UTF-16 pair
        raise OSError(errno.EINVAL, f"no name of a file ({error})", str(path)) from error
    file_type = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(file_type):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(file_type) else errno.EINVAL
        raise OSError(number, "a folder, expected a file" if stat.S_ISDIR(file_type) else "no regular file", str(path))
    return io.FileIO(descriptor)


def read_file(path: Path) -> bytes:
    """The content of a regular file. Raises `OSError`."""
    with open_regular_file(path) as file:
        return file.read()


def parse_json(content: bytes) -> Any:
    """Raises `ValueError` for what is not JSON, and for what no program of ours writes: numbers that are not finite,
    text that is not Unicode, more than MAX_DEPTH values in values.
    """
    try:
        value = json.loads(content, parse_float=_parse_float, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from error
    require_plain(value)
    return value


def require_plain(value: Any) -> None:
    """Raise `ValueError` for a parsed value that is nested too deep, has text that is not Unicode, or huge integers."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                deeper.extend(each)
                deeper.extend(each.values())
            elif isinstance(each, list):
                deeper.extend(each)
            elif isinstance(each, str):
                each.encode()  # raises `UnicodeEncodeError`, which is a `ValueError`, at half of a UTF-16 pair
            elif isinstance(each, int) and each.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"an integer of {each.bit_length():,} bits")
        level = deeper
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
