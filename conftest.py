"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them ignore Ctrl-C, which programs that they start inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
