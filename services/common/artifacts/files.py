"""Computes the checksums of an artifact's files at publish, and checks them when files are verified or copied."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder
from services.common.errors import ArtifactError, is_damage, unreadable
from services.common.problem_list import list_problems

Level = Literal["provenance", "full", "size"]
"""Depth of a check. `size` compares sizes alone, `full` also the xxh3-128, and `provenance` the SHA-256, too."""

_BLOCK_BYTES = 4 * 2**20
_CACHED_BLOCK_BYTES = 2**19
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
    fast, strong, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with (folder / path).open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return FileEntry(path=path, bytes=size, xxh3_128=fast.hexdigest(), sha256=strong.hexdigest())


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


def listed_file(folder: Path, manifest: Manifest, path: str) -> Path:
    """Check the file that the manifest lists as `path`, as `verify_files` does, and return where it is."""
    verify_files(folder, manifest, paths=[path])
    return folder / path


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
            + "\nDo not train on it. Move the folder away and run the stage again to make it anew."
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
    hasher = xxhash.xxh3_128()
    for block in _read_blocks(path):
        hasher.update(block)
    return hasher.hexdigest()


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


def _find_damage(
    folder: Path, entry: FileEntry, level: Level, hash_file: Callable[[Path], str] = xxh3_of
) -> str | None:
    """Return a description of a file's damage; None for an intact file."""
    path = folder / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}"
        if level != "size" and (found := hash_file(path)) != entry.xxh3_128:
            return f"{entry.path}: xxh3-128 is {found}, the manifest says {entry.xxh3_128}"
        if level == "provenance":
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry.sha256:
                return f"{entry.path}: sha256 is {found}, the manifest says {entry.sha256}"
    except OSError as error:
        if str(error.filename) != str(path):
            raise  # of the target of a copy
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return f"{entry.path}: missing"
        explained = unreadable(path, error)
        if not is_damage(explained):
            raise explained from error
        return f"{entry.path}: cannot be read: {error.strerror}"
    return None


def _copy(folder: Path, entry: FileEntry, target: Path) -> str | None:
    """Copy a file. Return its damage, which leaves no copy; None for an intact file."""
    damage = _find_damage(folder, entry, "full", partial(_copy_and_hash, target=target))
    if damage:
        target.unlink(missing_ok=True)
    return damage


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
    """Yield the content of a file in blocks that are overwritten by the next one."""
    # A buffer that stays in the CPU's cache: 14 GB/s, where new blocks of 4 MiB give 6. Not mapped: a file that shrinks
    # meanwhile would end the process.
    block = bytearray(_CACHED_BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while size := _read_into(file, block):
            yield view[:size]


def _read_into(file: io.FileIO, block: bytearray) -> int:
    try:
        return file.readinto(block) or 0
    except OSError as error:
        error.filename = file.name  # tells it from an error of what the block is written to
        raise
