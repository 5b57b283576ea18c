"""Waiting for things in the account to go."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.errors import TryAgain

POLL_SECONDS = 10.0


def wait_until_none(what: str, find: Callable[[], list[str]], timeout_seconds: float, advice: str) -> None:
    """Until `find` finds none; a change of what it waits for is printed.

    Raises `TryAgain` with the advice where some are left at the end.
    """
    deadline = time.monotonic() + timeout_seconds
    said = ""
    while left := find():
        state = f"waiting     for {what} to go: {shorten(left)}"
        if state != said:
            print(state, flush=True)
            said = state
        if time.monotonic() > deadline:
            raise TryAgain(
                f"{what} are still there after {timeout_seconds:.0f} s: {', '.join(left)}. {advice}. The same command "
                f"continues"
            )
        time.sleep(POLL_SECONDS)


def shorten(names: list[str]) -> str:
    """The first five of them, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
