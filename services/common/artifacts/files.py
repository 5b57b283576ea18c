"""The files of an artifact: their checksums, computed once at publish and checked at every use, and where they are.

A manifest is another program's word. Nothing but `locate` joins its paths with the artifact's folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder, unreadable
from services.common.errors import ArtifactError, TryAgain, UnreadableError
from services.common.input_file import open_regular_file

Level = Literal["full", "size"]

_BLOCK_BYTES = 4 * 2**20
_CACHED_BLOCK_BYTES = 2**19
_MAKE_ANEW = "Move the folder away and run the stage again to make it anew."
_HASHING_THREADS = 4  # xxhash and hashlib release the GIL on blocks of this size


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Fsync and hash every file below `folder`, in the order of their paths."""
    paths = list_files(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = tuple(pool.map(lambda path: describe_file(folder, path), paths))
    for directory in sorted({parent for path in paths for parent in Path(path).parents} | {Path()}):
        sync_folder(folder / directory)
    return entries


def verify_files(
    folder: Path, manifest: Manifest, *, level: Level = "full", paths: Collection[str] | None = None
) -> None:
    """Check what the manifest lists against the disk: sizes (`level="size"`), or sizes and checksums (`"full"`).

    All of it, or the files at `paths` alone, which have to be listed.

    Raises `ArtifactError` that names every file which is missing, resized or changed, or is no regular file inside of
    the folder; `UnreadableError` when this user may not read one.
    """
    listed = [entry for entry in manifest.files if paths is None or entry.path in paths]
    try:
        manifest.require_listed(paths or ())
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST}: {error}. {_MAKE_ANEW}") from error
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        found = pool.map(lambda entry: _find_damage(folder, entry, level), listed)
        damages = [damage for damage in found if damage]
    if damages:
        raise ArtifactError(
            f"{folder}: {len(damages)} of {len(listed)} files are damaged:\n  "
            + "\n  ".join(damages)
            + f"\nDo not train on it. {_MAKE_ANEW}"
        )


def listed_file(folder: Path, manifest: Manifest, path: str, *, level: Level = "full") -> Path:
    """The file that the manifest lists as `path`, checked as `verify_files` does."""
    verify_files(folder, manifest, level=level, paths=[path])
    return locate(folder, path)


def locate(folder: Path, path: str) -> Path:
    """The regular file at `path` of a manifest that was read, in the artifact's folder.

    Raises `ArtifactError` when it is missing, or something else, or when a link on the way leads out of the folder.
    The bytes are `verify_files`' to check.
    """
    try:
        _status_of(folder, path)
    except OSError as error:
        raise unreadable(folder / path, error) from error
    return folder / path


def list_files(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, sorted, but for the manifest itself."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def total_bytes(files: Iterable[FileEntry]) -> int:
    return sum(entry.bytes for entry in files)


def xxh3_of(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    # A buffer that stays in the CPU's cache: 14 GB/s, where new blocks of 4 MiB give 6. Not mapped: a file that shrinks
    # meanwhile would end the process.
    block = bytearray(_CACHED_BLOCK_BYTES)
    view = memoryview(block)
    with open_regular_file(path) as file:
        while size := file.readinto(block):
            hasher.update(view[:size])
    return hasher.hexdigest()


def describe_file(folder: Path, path: str) -> FileEntry:
    """Fsync and hash one file below `folder`. Its name is as durable as its folder."""
    fast, strong, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with (folder / path).open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return FileEntry(path=path, bytes=size, xxh3_128=fast.hexdigest(), sha256=strong.hexdigest())


def _find_damage(folder: Path, entry: FileEntry, level: Level) -> str | None:
    try:
        size = _status_of(folder, entry.path).st_size
        if size != entry.bytes:
            return f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}"
        if level == "full" and (found := xxh3_of(folder / entry.path)) != entry.xxh3_128:
            return f"{entry.path}: xxh3-128 is {found}, the manifest says {entry.xxh3_128}"
    except (FileNotFoundError, NotADirectoryError):
        return f"{entry.path}: missing"
    except OSError as error:
        explained = unreadable(folder / entry.path, error)
        if isinstance(explained, (UnreadableError, TryAgain)):
            raise explained from error
        return f"{entry.path}: cannot be read: {error.strerror or error}"
    return None


def _status_of(folder: Path, path: str) -> os.stat_result:
    """Raises `OSError` unless a regular file is at `path` below `folder`."""
    place = str(folder)
    for part in path.split("/"):
        place = f"{place}/{part}"
        status = os.lstat(place)
        if stat.S_ISLNK(status.st_mode):
            inside = os.path.realpath(folder, strict=True)
            if not os.path.realpath(place, strict=True).startswith(f"{inside}/"):
                raise OSError(errno.EXDEV, "a link that leads out of the artifact", place)
            status = Path(place).stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", place)
    return status
