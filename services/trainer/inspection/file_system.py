"""What a file system promises and how fast it is, measured by doing what a run does there.

Everything happens in one folder, `.probe-<token>`, that goes away with the block. One that a killed process left is
removed by the next probe at the same place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from services.common.artifacts.process import ProcessName, is_running, this_process
from services.common.errors import StorageError
from services.common.input.files import InputFileError, parse_json, read_file

PROBE_PREFIX = ".probe-"
SMALL_BYTES = 4096
BLOCK_BYTES = 4 * 2**20
REPEATS = 9
ABANDONED_SECONDS = 3600.0
"""After which a probe of another node counts as left behind: one takes seconds."""

_MOUNTS = Path("/proc/self/mountinfo")
_OWNER = "owner.json"


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    """As /proc names it: ext4, tmpfs, overlay, nfs4, lustre."""


@dataclass(frozen=True)
class FileSystemSpeed:
    fsync_seconds: float
    """Median of a write of SMALL_BYTES and its fsync."""
    create_seconds: float
    """Median of making an empty file."""
    write_bytes_per_second: float
    """One file from begin to end, with its fsync."""
    read_bytes_per_second: float
    """The same file, after the kernel was asked to forget it. A network file system may still remember it."""


def find_mount(path: Path) -> Mount | None:
    """The mount that `path` is on; None where the kernel does not list mounts, as on macOS."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return None
    real, found = Path(os.path.realpath(path)), None
    for line in lines:  # proc(5): fields vary in number up to a dash
        fields, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4])
        # Of two mounts at one place the later one is seen.
        if real.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, after.split()[0])
    return found


def existing_place(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: what is made at `path` will be on its file system."""
    return next(place for place in (path, *path.parents) if place.exists())


@contextmanager
def probe_folder(place: Path) -> Iterator[Path]:
    """An empty folder at `place` for a probe. Raises `OSError` where none can be made."""
    folder = place / f"{PROBE_PREFIX}{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    try:
        (folder / _OWNER).write_text(json.dumps(asdict(this_process())), encoding="utf-8")
        _remove_abandoned(place, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(place: Path, own: Path) -> None:
    for folder in place.glob(f"{PROBE_PREFIX}????????"):
        with suppress(OSError):
            if folder != own and _is_abandoned(folder, own):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path, own: Path) -> bool:
    try:
        owner = ProcessName(**parse_json(read_file(folder / _OWNER, folder)))
        is_alive = is_running(owner)
    except (FileNotFoundError, InputFileError, ValueError, TypeError):  # killed before it wrote its name
        is_alive = None
    if is_alive is None:  # both times are the file system's, of folders that it has made
        return own.stat().st_mtime - folder.stat().st_mtime > ABANDONED_SECONDS
    return not is_alive


def require_commits(folder: Path) -> None:
    """Raise `StorageError` unless renames and links do in `folder`, which is empty, what a commit and a lease go by."""
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
        raise _broken(folder, "a folder that was renamed is not seen at its new place")
    os.link(old, folder / "link")
    try:
        os.link(full / "file", folder / "link")
    except FileExistsError:
        return
    raise _broken(folder, "a link replaces a file, so that two commands could hold one lease")


def _broken(folder: Path, what: str) -> StorageError:
    return StorageError(
        f"{folder.parent}: {what}. Pass a --root on a POSIX file system, such as ext4, XFS, NFS, Lustre."
    )


def measure_speed(folder: Path, num_bytes: int) -> FileSystemSpeed:
    """Of `folder`, with a file of `num_bytes`. Raises `OSError`."""
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
