"""Writes files of an artifact, and computes their checksums from the bytes on their way to the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from services.common.artifacts.manifest import FileEntry
from services.tokenizer.atomic_file import write_file


class HashedFile:
    """A file that is open for writing. `entry` describes it once everything is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._fast, self._strong, self._bytes = xxhash.xxh3_128(), hashlib.sha256(), 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, content: bytes) -> int:
        self._fast.update(content)
        self._strong.update(content)
        self._bytes += len(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Do nothing, because `write_hashed_file` closes the file. pyarrow calls this method."""

    def entry(self, path: str) -> FileEntry:
        """Return the manifest's entry for the file, whose path in the artifact is `path`."""
        return FileEntry(path=path, bytes=self._bytes, xxh3_128=self._fast.hexdigest(), sha256=self._strong.hexdigest())


@contextmanager
def write_hashed_file(path: Path) -> Iterator[HashedFile]:
    """Yield a temporary file, and rename it to `path` when the block ends and its bytes are on the disk.

    The name is durable once the folder is synced.
    """
    with write_file(path) as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())
