"""Runs promtool, which Debian has in its package prometheus."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def require_program(name: str) -> str:
    """Return the path of a program of the package prometheus; skip the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on PATH: apt-get install prometheus")
    return path


def run_promtool(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [require_program("promtool"), *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
