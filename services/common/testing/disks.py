"""A small file system of a test's own, which can be full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size at `folder`, which is made. Skips the test where this user cannot mount one."""
    folder.mkdir()
    done = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    if done.returncode:
        pytest.skip(f"this user cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazy: a child of the stage that was ended may hold a file for a moment longer.
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    """Change what is mounted there: "size=64m", "ro"."""
    done = _mount("-o", f"remount,{options}", folder)
    assert done.returncode == 0, done.stderr


def _mount(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
