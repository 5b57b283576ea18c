"""Computes the checksums of an artifact's files at publish, and checks them when files are verified or copied."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder
from services.common.errors import ArtifactError, adding_path, is_damage, unreadable
from services.common.problem_list import list_problems

Level = Literal["size", "full", "provenance"]
"""Depth of a check. `size` compares sizes alone, `full` also the xxh3-128, and `provenance` the SHA-256, too."""

_HASHERS: dict[Level, dict[str, Callable[[], Any]]] = {
    "full": {"xxh3_128": xxhash.xxh3_128},
    "provenance": {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256},
}
# A buffer that stays in the CPU's cache: 14 GB/s, where new blocks of 4 MiB give 6.
_BLOCK_BYTES = 2**19
_FILES_AT_A_TIME = 1_024
"""Files that are queued for the threads at a time, so that a large corpus does not fill memory with waiting files."""
_HASHING_THREADS = 4  # xxhash and hashlib release the GIL on blocks of this size


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Fsync and hash every file below `folder`; return the entries in the order of their paths."""
    paths = list_files(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = tuple(pool.map(lambda path: describe_file(folder, path), paths))
    for directory in sorted({parent for path in paths for parent in Path(path).parents} | {Path()}):
        sync_folder(folder / directory)
    return entries


def describe_file(folder: Path, path: str) -> FileEntry:
    """Fsync and hash one file below `folder`. Its name is durable once its folder is fsynced."""
    with (folder / path).open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        hashes, size = _hash_file(file, "provenance")
    return FileEntry(path=path, bytes=size, **hashes)


def verify_files(
    folder: Path, manifest: Manifest, *, level: Level = "full", paths: Collection[str] | None = None
) -> None:
    """Compare the files that the manifest lists with those on disk: all of them, or only those at `paths`.

    Raises `ArtifactError` that names the first damaged files: missing, resized, changed, or not listed. Raises
    `UnreadableError` or `TryAgain` where a file cannot be read, which says nothing about its bytes.
    """
    listed = _listed(folder, manifest, paths)
    require_undamaged(folder, len(listed), find_damages(folder, listed, level))


def copy_files(folder: Path, manifest: Manifest, targets: Mapping[str, Path]) -> None:
    """Copy the files that the manifest lists as the keys of `targets` to the paths there, in folders that exist.

    Each file is read once: its checksum is computed of the bytes that are written. Raises the errors of `verify_files`,
    and leaves no copy of a damaged file. An error of a target is raised unchanged.
    """
    listed = _listed(folder, manifest, targets)
    damages = _find_by(lambda entry: _copy(folder, entry, targets[entry.path]), listed)
    require_undamaged(folder, len(listed), damages)


def find_damages(folder: Path, entries: Sequence[FileEntry], level: Level) -> Iterator[str]:
    """Yield a description of each damaged file. Raises what `verify_files` raises besides damage."""
    return _find_by(lambda entry: _find_damage(folder, entry, level), entries)


def require_undamaged(folder: Path, num_files: int, damages: Iterable[str]) -> None:
    """Raise the `ArtifactError` of `verify_files` if there is a damage among `num_files` files that were verified."""
    found = list(damages)
    if found:
        raise ArtifactError(
            f"{folder}: {len(found)} of {num_files} files are damaged:\n  "
            + "\n  ".join(list_problems(found, "damaged"))
            + "\nDo not train on it. Move the folder away and rerun the stage to rebuild it."
        )


def locate(folder: Path, path: str) -> Path:
    """Return where an artifact's file is, without a check of its bytes. Raises `ArtifactError` where it is missing."""
    try:
        (folder / path).stat()
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
    with path.open("rb", buffering=0) as file:
        return _hash_file(file, "full")[0]["xxh3_128"]


def _listed(folder: Path, manifest: Manifest, paths: Collection[str] | None) -> list[FileEntry]:
    """Return the manifest's entries of `paths`, or all for None. Raises `ArtifactError` for a path without an entry."""
    try:
        manifest.require_listed(paths or ())
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST}: {error}. Move the folder away and run the stage again.") from error
    return [entry for entry in manifest.files if paths is None or entry.path in paths]


def _find_by(find: Callable[[FileEntry], str | None], entries: Sequence[FileEntry]) -> Iterator[str]:
    """Call `find` in a few threads, and yield the damages in the order of the entries."""
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for start in range(0, len(entries), _FILES_AT_A_TIME):
            yield from filter(None, pool.map(find, entries[start : start + _FILES_AT_A_TIME]))


def _find_damage(folder: Path, entry: FileEntry, level: Level, copy: BinaryIO | None = None) -> str | None:
    """Return a description of a file's damage; None for an intact file, whose bytes were written to `copy`."""
    path = folder / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}"
        if level == "size":
            return None
        with path.open("rb", buffering=0) as file:
            hashes, _ = _hash_file(file, level, copy)
    except OSError as error:
        if str(error.filename) != str(path):
            raise  # of the target of a copy
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"{entry.path}: missing"
        problem = unreadable(path, error)
        if not is_damage(problem):
            raise problem from error
        return f"{entry.path}: cannot be read: {error.strerror}"
    for name, found in hashes.items():
        if found != (expected := getattr(entry, name)):
            return f"{entry.path}: {name.replace('_', '-')} is {found}, the manifest says {expected}"
    return None


def _copy(folder: Path, entry: FileEntry, target: Path) -> str | None:
    """Copy a file with its times and permissions. Return its damage, which leaves no copy; None for an intact file."""
    with target.open("wb") as copy:
        damage = _find_damage(folder, entry, "full", copy)
    if damage:
        target.unlink()
    else:
        shutil.copystat(folder / entry.path, target)
    return damage


def _hash_file(file: io.FileIO, level: Level, copy: BinaryIO | None = None) -> tuple[dict[str, str], int]:
    """Read a file once; return the checksums of this level and its size. The bytes are also written to `copy`.

    It is not mapped: a file that shrinks meanwhile would end the process.
    """
    hashers = {name: new() for name, new in _HASHERS[level].items()}
    size, block = 0, bytearray(_BLOCK_BYTES)
    view = memoryview(block)
    while num_bytes := _read_into(file, block):
        for hasher in hashers.values():
            hasher.update(view[:num_bytes])
        if copy:
            copy.write(view[:num_bytes])
        size += num_bytes
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}, size


def _read_into(file: io.FileIO, block: bytearray) -> int:
    with adding_path(Path(str(file.name))):  # tells it from an error of what the block is written to
        return file.readinto(block) or 0
