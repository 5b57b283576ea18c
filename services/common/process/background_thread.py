"""Runs work in a background thread during a block, and tells the thread when the block is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def running_in_background(
    work: Callable[[threading.Event], None], name: str, end_seconds: float | None = None
) -> Iterator[None]:
    """Run `work(is_over)` in a thread called `name` during the block, and set `is_over` at the block's end.

    The end of the block waits for `work`, for at most `end_seconds` if given: it may hang with a file system.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(end_seconds)
