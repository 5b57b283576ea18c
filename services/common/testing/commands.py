"""Starts commands as a shell does: each in a process group of its own, with one stream of output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def start_python(words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """Start Python with these words in the repository, and these variables besides this process's own."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_python(words: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Do the same as `start_python`, and wait for the end."""
    process = start_python(words, **environment)
    output, _ = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output)
