"""Counts the operations of the test's own process on the file system."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def count_operations(root: Path, fatal: int = -1) -> list[str]:
    """Return the list to which this process's file system operations below `root` are added from now on.

    Before the operation with the number `fatal`, the process kills itself.
    """
    operations: list[str] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"} and str(
            arguments[0]
        ).startswith(str(root)):
            operations.append(event)
            if len(operations) == fatal + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    return operations
