"""Writes files that are complete or absent, also when the process is killed or the disk is full."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename it to `path` when the block ends.

    The file is not synced, so its bytes may be wrong after a power cut. Files in scratch are checked against their
    checksums before use, and `write_hashed_file` syncs and hashes the files of a corpus. A sync of every file took
    a fifth of the stage's time.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
