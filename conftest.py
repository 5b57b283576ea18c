"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

deselected = pytest.StashKey[int]()


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them ignore Ctrl-C, which programs that they start inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    stash = items[0].config.stash
    stash[deselected] = stash.get(deselected, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A file whose tests are all left out by default has nothing to do by default, and that is no failure.

    Pants runs one file at a time, and takes pytest's exit code for "no tests ran" as one.
    """
    options = session.config.option
    is_default = options.markexpr in session.config.getini("addopts") and not options.keyword
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_default and session.config.stash.get(deselected, 0):
        session.exitstatus = pytest.ExitCode.OK
