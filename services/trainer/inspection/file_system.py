"""Checks a file system's guarantees and measures its speed, with the operations of a run.

All probes happen in one folder, `.probe-<token>`, which is removed afterwards. The next probe in the same place removes
the folder of a probe that was killed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.lock import LockTaken, hold_lock
from services.common.artifacts.store import LOCK_SUFFIX
from services.common.errors import StorageError

PROBE_PREFIX = ".probe-"
SMALL_BYTES = 4096
BLOCK_BYTES = 4 * 2**20
REPEATS = 9

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    """Type of the file system in /proc's words: ext4, tmpfs, overlay, nfs4, lustre."""


@dataclass(frozen=True)
class FileSystemSpeed:
    """Measured speed of a file system."""

    fsync_seconds: float
    """Median seconds for a write of SMALL_BYTES and its fsync."""
    create_seconds: float
    """Median seconds for making an empty file."""
    write_bytes_per_second: float
    """Speed of writing one file with its fsync."""
    read_bytes_per_second: float
    """Speed of reading that file after the kernel dropped it from its cache. A file server may still cache it."""


def find_mount(path: Path) -> Mount | None:
    """Return the mount of `path`; None if the kernel does not list mounts, as on macOS."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return None
    real, found = Path(os.path.realpath(path)), None
    for line in lines:  # proc(5): the number of fields before the dash varies
        fields, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        # The later one of two mounts at the same point hides the other.
        if real.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, after.split()[0])
    return found


def existing_place(path: Path) -> Path:
    """Return `path` or the nearest existing folder above it, on whose file system `path` will be made."""
    return next(place for place in (path, *path.parents) if place.exists())


@contextmanager
def probe_folder(place: Path) -> Iterator[Path]:
    """Make an empty folder at `place` for a probe, and remove it afterwards. Raises `OSError` if that fails."""
    folder = place / f"{PROBE_PREFIX}{uuid.uuid4().hex[:8]}"
    with hold_lock(folder.with_name(folder.name + LOCK_SUFFIX)):
        folder.mkdir(mode=0o700)
        try:
            _remove_abandoned(place)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{PROBE_PREFIX}????????"):
        with suppress(OSError, LockTaken), hold_lock(folder.with_name(folder.name + LOCK_SUFFIX), waits=False):
            shutil.rmtree(folder, ignore_errors=True)


def require_commits(folder: Path) -> None:
    """Raise `StorageError` unless renames in the empty `folder` work as commits need."""
    new, old = folder / "new", folder / "old"
    old.write_bytes(b"old")
    with new.open("wb") as file:
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
    new.rename(old)
    if new.exists() or old.read_bytes() != b"new":
        raise _broken(folder, "a rename does not replace a file")
    full, other = folder / "full", folder / "other"
    for each in (full, other):
        each.mkdir()
        (each / "file").touch()
    try:
        other.rename(full)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        raise _broken(folder, "a rename replaces a folder that has files in it")
    moved = folder / "moved"
    other.rename(moved)
    if not (moved / "file").exists():
        raise _broken(folder, "a renamed folder is missing at its new place")


def _broken(folder: Path, what: str) -> StorageError:
    return StorageError(
        f"{folder.parent}: {what}. Pass a --root on a POSIX file system, such as ext4, XFS, NFS, Lustre."
    )


def measure_speed(folder: Path, num_bytes: int) -> FileSystemSpeed:
    """Measure the speed of the file system at `folder` with a file of `num_bytes`. Raises `OSError`."""
    synced, created = [], []
    with (folder / "synced").open("wb", buffering=0) as file:
        for _ in range(REPEATS):
            began = time.perf_counter()
            file.write(b"\1" * SMALL_BYTES)
            os.fsync(file.fileno())
            synced.append(time.perf_counter() - began)
    for number in range(REPEATS):
        began = time.perf_counter()
        (folder / f"created-{number}").touch()
        created.append(time.perf_counter() - began)
    block = os.urandom(min(BLOCK_BYTES, num_bytes))  # some file systems compress
    count = max(1, num_bytes // len(block))
    large = folder / "large"
    began = time.perf_counter()
    with large.open("wb", buffering=0) as file:
        for _ in range(count):
            _write_all(file.fileno(), block)
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    with large.open("rb", buffering=0) as file:
        while file.read(BLOCK_BYTES):
            pass
    read_seconds = time.perf_counter() - began
    large.unlink()
    size = count * len(block)
    return FileSystemSpeed(
        statistics.median(synced), statistics.median(created), size / write_seconds, size / max(read_seconds, 1e-9)
    )


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]
