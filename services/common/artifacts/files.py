"""Checksums of an artifact's files: computed once at publish, checked at every use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from services.common.artifacts.manifest import MANIFEST, FileEntry, Manifest, sync_folder
from services.common.errors import ArtifactError

_BLOCK_BYTES = 4 * 2**20
_CACHED_BLOCK_BYTES = 2**19
_HASHING_THREADS = 4  # xxhash and hashlib release the GIL on blocks of this size


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Fsync and hash every file below `folder`, in the order of their paths."""
    paths = list_files(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = tuple(pool.map(lambda path: _describe(folder, path), paths))
    for directory in sorted({parent for path in paths for parent in Path(path).parents} | {Path()}):
        sync_folder(folder / directory)
    return entries


def verify_files(
    folder: Path, manifest: Manifest, *, level: str = "full", paths: Collection[str] | None = None
) -> None:
    """Check what the manifest lists against the disk: sizes (`level="size"`), or sizes and checksums (`"full"`).

    All of it, or the files at `paths` alone.

    Raises `ArtifactError` that names every file which is missing, resized or changed.
    """
    listed = [entry for entry in manifest.files if paths is None or entry.path in paths]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        found = pool.map(lambda entry: _find_damage(folder, entry, level), listed)
        damages = [damage for damage in found if damage]
    if damages:
        raise ArtifactError(
            f"{folder}: {len(damages)} of {len(listed)} files are damaged:\n  "
            + "\n  ".join(damages)
            + "\nDo not train on it. Move the folder away and run the stage again to make it anew."
        )


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
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            hasher.update(view[:size])
    return hasher.hexdigest()


def _describe(folder: Path, path: str) -> FileEntry:
    fast, strong, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with (folder / path).open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK_BYTES):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return FileEntry(path=path, bytes=size, xxh3_128=fast.hexdigest(), sha256=strong.hexdigest())


def _find_damage(folder: Path, entry: FileEntry, level: str) -> str | None:
    path = folder / entry.path
    if not path.is_file():
        return f"{entry.path}: missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{entry.path}: {size:,} bytes, the manifest says {entry.bytes:,}"
    if level == "full" and (found := xxh3_of(path)) != entry.xxh3_128:
        return f"{entry.path}: xxh3-128 is {found}, the manifest says {entry.xxh3_128}"
    return None
