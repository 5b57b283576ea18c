"""Waits until resources are gone from the account."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.errors import TryAgain
from services.common.problem_list import list_names

POLL_SECONDS = 10.0


def wait_until_none(what: str, find: Callable[[], list[str]], timeout_seconds: float, advice: str) -> None:
    """Waits until `find` returns nothing, and prints what is left whenever that changes.

    Raises `TryAgain` with the advice if some are left after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    said = ""
    while left := find():
        state = f"waiting     until these {what} are gone: {list_names(left)}"
        if state != said:
            print(state, flush=True)
            said = state
        if time.monotonic() > deadline:
            raise TryAgain(
                f"{what} are not gone after {timeout_seconds:.0f} s: {', '.join(left)}. {advice}. Run the same command "
                f"again to continue"
            )
        time.sleep(POLL_SECONDS)
