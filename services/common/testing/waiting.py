"""Waits in tests for another process or thread."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

_PAUSE_SECONDS = 0.002
_PAUSE_SHARE = 9  # a pause takes this many times the look before it, so that a waiting test uses little CPU


def wait_until(
    condition: Callable[[], object], seconds: float = 60.0, *, process: subprocess.Popen[str] | None = None
) -> None:
    """Look again and again until the condition holds.

    Fails after `seconds`, or with the output of `process` where that ends before.
    """
    deadline = time.monotonic() + seconds
    while True:
        looks_at = time.monotonic()
        has_ended = process is not None and process.poll() is not None
        if condition():  # it may hold although the process has ended since the last look
            return
        if process is not None and has_ended:
            said = "\n".join(filter(None, process.communicate()))
            raise AssertionError(f"the process ended with {process.returncode} before it happened: {said}")
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} seconds"
        time.sleep(max(_PAUSE_SECONDS, _PAUSE_SHARE * (time.monotonic() - looks_at)))
