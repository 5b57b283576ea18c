"""The files of an artifact: their checksums, computed once at publish and checked at every use, and where they are.

A manifest is another program's word. Nothing but `locate` joins its paths with the artifact's folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder
from services.common.errors import ArtifactError
from services.common.input.files import is_damage, open_regular_file, stat_within, unreadable
from services.common.input.problem_list import ProblemList

Level = Literal["provenance", "full", "size"]
"""What is checked of a file: its size, its size and the checksum that readers go by, or these and its SHA-256."""

_BLOCK_BYTES = 4 * 2**20
_CACHED_BLOCK_BYTES = 2**19
_MAKE_ANEW = "Move the folder away and run the stage again to make it anew."
_FILES_AT_A_TIME = 1_024
"""Files that are handed to the threads at a time: all of a large corpus would wait in memory."""
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
    """Check what the manifest lists against the disk. All of it, or the files at `paths` alone, which have to be
    listed.

    Raises `ArtifactError` that names the files which are missing, resized or changed, or are no regular files inside of
    the folder, ten of each kind; `UnreadableError` when this user may not read one; `LimitError` or `TryAgain` when one
    cannot be opened for want of descriptors or memory, which says nothing about its bytes.
    """
    listed = [entry for entry in manifest.files if paths is None or entry.path in paths]
    try:
        manifest.require_listed(paths or ())
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST}: {error}. {_MAKE_ANEW}") from error
    damages = ProblemList()
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for begin in range(0, len(listed), _FILES_AT_A_TIME):
            some = listed[begin : begin + _FILES_AT_A_TIME]
            for damage in pool.map(lambda entry: _find_damage(folder, entry, level), some):
                if damage:
                    damages.add(*damage)
    if damages:
        raise ArtifactError(
            f"{folder}: {len(damages)} of {len(listed)} files are damaged:\n  "
            + "\n  ".join(damages.lines())
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
        stat_within(folder, path)
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
    with open_regular_file(folder / path) as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return FileEntry(path=path, bytes=size, xxh3_128=fast.hexdigest(), sha256=strong.hexdigest())


def _sha256_of(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_damage(folder: Path, entry: FileEntry, level: Level) -> tuple[str, str] | None:
    """The kind of the damage, and what is wrong with this file."""
    path = folder / entry.path
    try:
        size = stat_within(folder, entry.path).st_size
        if size != entry.bytes:
            return "of another size", f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}"
        if level != "size" and (found := xxh3_of(path)) != entry.xxh3_128:
            return "changed", f"{entry.path}: xxh3-128 is {found}, the manifest says {entry.xxh3_128}"
        if level == "provenance" and (found := _sha256_of(path)) != entry.sha256:
            return "of another SHA-256", f"{entry.path}: sha256 is {found}, the manifest says {entry.sha256}"
    except FileNotFoundError:
        return "missing", f"{entry.path}: missing"
    except OSError as error:
        explained = unreadable(path, error)
        if not is_damage(explained):
            raise explained from error
        return "cannot be read", f"{entry.path}: cannot be read: {error.strerror or error}"
    return None
