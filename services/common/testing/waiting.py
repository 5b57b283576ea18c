"""Waiting in tests for what another process or thread will do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

_PAUSE_SECONDS = 0.002
_PAUSE_SHARE = 9  # times what a look took: a test that waits leaves the cores to what it waits for


def wait_until(
    condition: Callable[[], object], seconds: float = 60.0, *, process: subprocess.Popen[str] | None = None
) -> None:
    """Look again and again until the condition holds.

    Fails when it does not within so many seconds, or when `process` ends before: with what that said.
    """
    deadline = time.monotonic() + seconds
    while True:
        looks_at = time.monotonic()
        has_ended = process is not None and process.poll() is not None
        if condition():  # also of a process that has ended since the last look
            return
        if process is not None and has_ended:
            said = "\n".join(filter(None, process.communicate()))
            raise AssertionError(f"the process ended with {process.returncode} before it happened: {said}")
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} seconds"
        time.sleep(max(_PAUSE_SECONDS, _PAUSE_SHARE * (time.monotonic() - looks_at)))
