"""Measures the space of a file system as a user sees it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


class Space(NamedTuple):
    """Space of a file system in bytes, as `df` counts it: without the blocks that only root may use."""

    size_bytes: int
    available_bytes: int

    @property
    def used_share(self) -> float:
        """Share of the size that is in use, from 0 to 1."""
        return 1 - self.available_bytes / self.size_bytes if self.size_bytes else 0.0


def measure_space(path: Path) -> Space:
    """Return the space of the file system of `path`. Raises `OSError`; hangs while a file server does not answer."""
    usage = shutil.disk_usage(path)
    return Space(usage.used + usage.free, usage.free)
