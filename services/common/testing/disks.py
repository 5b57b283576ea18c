"""Mounts a small file system for a test, which can be full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Make `folder` and mount a tmpfs of that size there. Skips the test where this user cannot mount."""
    folder.mkdir()
    done = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    if done.returncode:
        pytest.skip(f"this user cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazy, because a child of the ended stage may hold a file for a moment longer.
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    """Mount the file system again with other options, such as "size=64m" or "ro"."""
    done = _mount("-o", f"remount,{options}", folder)
    assert done.returncode == 0, done.stderr


def _mount(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
