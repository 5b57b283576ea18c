"""Files that are whole or absent, also after a crash or on a full disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from services.common.artifacts.manifest import sync_folder

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that takes the place of `path` when the block ends; durable when this returns."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
