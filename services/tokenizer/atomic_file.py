"""Files that are whole or absent, also when the process is killed or the disk is full."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that takes the place of `path` when the block ends.

    Not durable: after a power cut its bytes may be wrong. What is in scratch is believed by its checksum alone, and
    what is published is synced and hashed then; a sync of every file in between took a fifth of the time.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
