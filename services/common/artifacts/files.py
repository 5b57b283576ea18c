"""Computes the checksums of an artifact's files at publish, and checks them when files are verified or copied.

A manifest may come from anywhere, so only `locate` joins its paths with the artifact's folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder
from services.common.errors import ArtifactError
from services.common.input.files import (
    InputFileError,
    MissingInputFile,
    is_damage,
    open_regular_file,
    stat_within,
    unreadable,
)
from services.common.input.problem_list import ProblemList

Level = Literal["provenance", "full", "size"]
"""Depth of a check. `size` compares sizes alone, `full` also the xxh3-128, and `provenance` the SHA-256, too."""

_BLOCK_BYTES = 4 * 2**20
_CACHED_BLOCK_BYTES = 2**19
_MAKE_ANEW = "Move the folder away and run the stage again to make it anew."
_FILES_AT_A_TIME = 1_024
"""Files that are queued for the threads at a time, so that a large corpus does not fill memory with waiting files."""
_HASHING_THREADS = 4  # xxhash and hashlib release the GIL on blocks of this size


class Damage(NamedTuple):
    """A difference between a file and its entry in the manifest."""

    kind: str
    """Kind of the damage, by which damages are counted."""
    description: str


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Fsync and hash every file below `folder`; return the entries in the order of their paths."""
    paths = list_files(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = tuple(pool.map(lambda path: describe_file(folder, path), paths))
    for directory in sorted({parent for path in paths for parent in Path(path).parents} | {Path()}):
        sync_folder(folder / directory)
    return entries


def verify_files(
    folder: Path, manifest: Manifest, *, level: Level = "full", paths: Collection[str] | None = None
) -> None:
    """Compare the files that the manifest lists with those on disk: all of them, or only those at `paths`.

    Raises `ArtifactError` that names up to ten files of each kind of damage: missing, resized, changed, not a regular
    file inside the folder, or not listed. Raises `UnreadableError` where this user may not read a file, and
    `LimitError` or `TryAgain` where a file cannot be opened for lack of descriptors or memory, which says nothing about
    its bytes.
    """
    listed = _listed(folder, manifest, paths)
    require_undamaged(folder, len(listed), find_damages(folder, listed, level))


def copy_files(folder: Path, manifest: Manifest, targets: Mapping[str, Path]) -> None:
    """Copy the files that the manifest lists as the keys of `targets` to the paths there, in folders that exist.

    Each file is read once: its checksum is computed of the bytes that are written. So this costs one read of the files,
    where `verify_files` and a copy after it cost two. Raises the errors of `verify_files`, and leaves no copy of a
    damaged file. An error of a target is raised unchanged.
    """
    listed = _listed(folder, manifest, targets)
    damages = _find_by(lambda entry: _copy(folder, entry, targets[entry.path]), listed)
    require_undamaged(folder, len(listed), damages)


def _listed(folder: Path, manifest: Manifest, paths: Collection[str] | None) -> list[FileEntry]:
    """Return the manifest's entries of `paths`, or all for None. Raises `ArtifactError` for a path without an entry."""
    try:
        manifest.require_listed(paths or ())
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST}: {error}. {_MAKE_ANEW}") from error
    return [entry for entry in manifest.files if paths is None or entry.path in paths]


def find_damages(folder: Path, entries: Sequence[FileEntry], level: Level) -> Iterator[Damage]:
    """Yield the damage of each file that differs from its entry. Raises what `verify_files` raises besides damage."""
    return _find_by(lambda entry: _find_damage(folder, entry, level), entries)


def require_undamaged(folder: Path, num_files: int, damages: Iterable[Damage]) -> None:
    """Raise the `ArtifactError` of `verify_files` if there is a damage among `num_files` files that were verified."""
    problems = ProblemList()
    for damage in damages:
        problems.add(*damage)
    if problems:
        raise ArtifactError(
            f"{folder}: {len(problems)} of {num_files} files are damaged:\n  "
            + "\n  ".join(problems.lines())
            + f"\nDo not train on it. {_MAKE_ANEW}"
        )


def _find_by(find: Callable[[FileEntry], Damage | None], entries: Sequence[FileEntry]) -> Iterator[Damage]:
    """Call `find` in a few threads, and yield the damages in the order of the entries."""
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for begin in range(0, len(entries), _FILES_AT_A_TIME):
            yield from filter(None, pool.map(find, entries[begin : begin + _FILES_AT_A_TIME]))


def listed_file(folder: Path, manifest: Manifest, path: str, *, level: Level = "full") -> Path:
    """Check the file that the manifest lists as `path`, as `verify_files` does, and return where it is."""
    verify_files(folder, manifest, level=level, paths=[path])
    return locate(folder, path)


def locate(folder: Path, path: str) -> Path:
    """Return the regular file at a manifest's `path` in the artifact's folder, without a check of its bytes.

    Raises `ArtifactError` where it is missing or no regular file, or where a link leads out of the folder.
    """
    try:
        stat_within(folder, path)
    except OSError as error:
        raise unreadable(folder / path, error) from error
    return folder / path


def list_files(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files below `folder` except the manifest."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def total_bytes(files: Iterable[FileEntry]) -> int:
    return sum(entry.bytes for entry in files)


def xxh3_of(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    for block in _read_blocks(path):
        hasher.update(block)
    return hasher.hexdigest()


def describe_file(folder: Path, path: str) -> FileEntry:
    """Fsync and hash one file below `folder`. Its name is durable once its folder is fsynced."""
    fast, strong, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with open_regular_file(folder / path) as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return FileEntry(path=path, bytes=size, xxh3_128=fast.hexdigest(), sha256=strong.hexdigest())


def _sha256_of(path: Path) -> str:
    hasher = hashlib.sha256()
    for block in _read_blocks(path):
        hasher.update(block)
    return hasher.hexdigest()


def _copy_and_hash(path: Path, target: Path) -> str:
    """Copy a file with its times and permissions, and return the xxh3-128 of the bytes that were written."""
    hasher = xxhash.xxh3_128()
    with target.open("wb") as copy:
        for block in _read_blocks(path):
            hasher.update(block)
            copy.write(block)
    shutil.copystat(path, target)
    return hasher.hexdigest()


def _read_blocks(path: Path) -> Iterator[memoryview]:
    """Yield the content of a regular file in blocks that are overwritten by the next one. Raises `InputFileError`."""
    # A buffer that stays in the CPU's cache: 14 GB/s, where new blocks of 4 MiB give 6. Not mapped: a file that shrinks
    # meanwhile would end the process.
    block = bytearray(_CACHED_BLOCK_BYTES)
    view = memoryview(block)
    with open_regular_file(path) as file:
        while size := _read_into(file, block, path):
            yield view[:size]


def _read_into(file: io.FileIO, block: bytearray, path: Path) -> int:
    """Read the next bytes, and return their number. Raises `InputFileError`, so that readers can tell it from errors
    of what they write.
    """
    try:
        return file.readinto(block) or 0
    except OSError as error:
        raise InputFileError(error.errno, error.strerror, str(path)) from error


def _copy(folder: Path, entry: FileEntry, target: Path) -> Damage | None:
    """Copy a file. Return its damage, which leaves no copy; None for an intact file."""
    damage = _find_damage(folder, entry, "full", partial(_copy_and_hash, target=target))
    if damage:
        target.unlink(missing_ok=True)
    return damage


def _find_damage(
    folder: Path, entry: FileEntry, level: Level, hash_file: Callable[[Path], str] = xxh3_of
) -> Damage | None:
    """Return the kind of damage and a description of it; None for an intact file."""
    path = folder / entry.path
    try:
        size = stat_within(folder, entry.path).st_size
        if size != entry.bytes:
            return Damage("of another size", f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}")
        if level != "size" and (found := hash_file(path)) != entry.xxh3_128:
            return Damage("changed", f"{entry.path}: xxh3-128 is {found}, the manifest says {entry.xxh3_128}")
        if level == "provenance" and (found := _sha256_of(path)) != entry.sha256:
            return Damage("of another SHA-256", f"{entry.path}: sha256 is {found}, the manifest says {entry.sha256}")
    except MissingInputFile:
        return Damage("missing", f"{entry.path}: missing")
    except InputFileError as error:
        explained = unreadable(path, error)
        if not is_damage(explained):
            raise explained from error
        return Damage("cannot be read", f"{entry.path}: cannot be read: {error.strerror or error}")
    return None
