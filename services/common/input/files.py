"""Opens and parses files from outside, within limits; all such files are read through this module.

A path may hold a folder, a pipe without a writer, a device without an end, a socket or a link to elsewhere. All of
these raise `InputFileError` at once, which a reader turns into an error for the user with `unreadable`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from services.common.errors import StorageError, is_damage, unreadable

MAX_DEPTH = 64
"""Deepest nesting of tables. Parsers and writers recurse for every level, and Python allows about 1,000 calls."""
MAX_INTEGER_BITS = 1_023
"""Bits of the largest integer that fits into a float. Python refuses to print more than 4,300 digits."""
MAX_VALUES = 2_000_000
"""Most values in a JSON text. A value takes about 100 bytes as a Python object; a manifest has five for each file."""
MAX_KEYS = 100_000
"""Most keys of a table. The error of an unknown key takes about 1,000 bytes."""
MAX_WHOLE_BYTES = 2**28
"""Default size of the largest file that is read as a whole."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


__all__ = ["is_damage", "unreadable"]


class InputFileError(OSError):
    """A file from outside cannot be read; `strerror` says why."""


class MissingInputFile(InputFileError, FileNotFoundError):
    """A file from outside does not exist."""


def open_regular_file(path: Path, within: Path | None = None) -> io.FileIO:
    """Open a regular file for reading without a buffer. Raises `InputFileError` for anything else.

    `within` is the folder in which the path was found, if no person chose it; links may then not leave that folder.
    """
    # Opened before its status is read: a network file system asks its server now, and may answer a `stat` from a cache.
    with _explaining(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_regular(path, os.fstat(descriptor))
        if within is not None:
            # Its path is checked and not its inode, because a file such as current.json may be replaced meanwhile.
            with _explaining(path):
                _real_path_within(path, within)
        return io.FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def require_regular_file(path: Path, within: Path | None = None) -> os.stat_result:
    """Open a regular file once and return its status, before a library opens the path itself.

    Some libraries wait for pipes, and some call every file missing that they cannot open. Raises `InputFileError`.
    """
    with open_regular_file(path, within) as file:
        return os.fstat(file.fileno())


def stat_within(folder: Path, path: str) -> os.stat_result:
    """Return the status of a regular file at `path`, with forward slashes, below `folder`.

    Raises `InputFileError` as `open_regular_file` does. It reads one status for each part of the path, and resolves
    only links, because a corpus has 65,000 files.
    """
    place = str(folder)
    with _explaining(folder / path):
        for part in path.split("/"):
            place = f"{place}/{part}"
            status = os.lstat(place)
            if stat.S_ISLNK(status.st_mode):
                status = Path(_real_path_within(Path(place), folder)).stat()
        _require_regular(folder / path, status)
    return status


def open_for_append(path: Path) -> BinaryIO:
    """Open a regular file, which is made if absent, for writing at its end.

    Raises `StorageError` where something else is in its place.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        is_dangling = error.errno == errno.ENOENT and path.is_symlink()  # ENXIO below: a pipe, a socket
        if is_dangling or error.errno in (
            errno.EISDIR,
            errno.ENXIO,
            errno.ENODEV,
            errno.ELOOP,
        ):
            raise _occupied(path, os.lstat(path)) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _occupied(path, status)
    return os.fdopen(descriptor, "ab")


def read_file(path: Path, within: Path | None = None, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
    """Return the content of a regular file. Raises `InputFileError`, also for more than `max_bytes`."""
    with open_regular_file(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
        if max(size, len(content)) > max_bytes:
            raise InputFileError(
                errno.EOVERFLOW, f"{max(size, len(content)):,} bytes, expected at most {max_bytes:,}", str(path)
            )
    return content


@contextmanager
def reading_inputs(folder: Path) -> Iterator[None]:
    """Raise what `unreadable` returns in place of an `OSError`, in a block that only reads below `folder`."""
    try:
        yield
    except OSError as error:
        raise unreadable(error.filename or folder, error) from error


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise `InputFileError` in place of the system's errors about `path`."""
    try:
        yield
    except InputFileError:
        raise
    except ValueError as error:  # a NUL, or half of a UTF-16 pair
        raise InputFileError(errno.EINVAL, f"not a file name ({error})", str(path)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or the device of a driver that is not there
            raise InputFileError(errno.EINVAL, "a socket or a device, expected a regular file", str(path)) from error
        kind = MissingInputFile if error.errno in (errno.ENOENT, errno.ENOTDIR) else InputFileError
        raise kind(error.errno, error.strerror, str(path)) from error


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise InputFileError(number, f"{_kind_of(status)}, expected a regular file", str(path))


def _kind_of(status: os.stat_result) -> str:
    return next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "something else")


def _real_path_within(path: Path, within: Path) -> str:
    """Return the path without links. Raises `OSError` where a link leads out of `within`."""
    real, inside = os.path.realpath(path, strict=True), os.path.realpath(_linked_root(within), strict=True)
    if real != inside and not real.startswith(inside.rstrip("/") + "/"):
        raise OSError(errno.EXDEV, f"a link that leads out of {within}", str(path))
    return real


def _linked_root(folder: Path) -> Path:
    """Return the folder that the links in `folder` may not leave.

    It is `folder` itself, except for a snapshot in Hugging Face's cache, `models--NAME/snapshots/REVISION`, whose files
    are links to `models--NAME/blobs` of the same download.
    """
    snapshots = folder.absolute().parent
    is_cached = snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
    return snapshots.parent if is_cached else folder


def _occupied(path: Path, status: os.stat_result) -> StorageError:
    kind = "a link" if stat.S_ISLNK(status.st_mode) else _kind_of(status)
    return StorageError(f"{path}: {kind}, in the place of a regular file. Move it away: `mv {path} {path}.aside`.")


def parse_json(content: bytes) -> Any:
    """Parse JSON. Raises `ValueError` for invalid JSON, and for JSON that Millrace never writes: numbers that are not
    finite, text that is not Unicode, or more than MAX_DEPTH levels, MAX_VALUES values or MAX_KEYS keys of a table.
    """
    if content.count(b",") > MAX_VALUES:  # before it takes memory
        raise ValueError(f"{content.count(b','):,} values, expected at most {MAX_VALUES:,}")
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
                if len(each) > MAX_KEYS:
                    raise ValueError(f"a table of {len(each):,} keys, expected at most {MAX_KEYS:,}")
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
    raise ValueError(f"{text} is not a JSON number")
