"""What holds for every test."""

from __future__ import annotations

import os
import signal

import pytest

# Where there are more threads than cores, those of OpenMP spin while they wait for one another: a sample of text took
# 6 s of CPU instead of 0.2. Here, because other files of this name import torch before anything is called.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each simulated account would else make 1,300 machine images for every region that it is asked about, 0.3 s each.
os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")


LONGEST = (
    "tests/integration/test_pipeline.py",
    "services/trainer/tests/test_command.py",
    "services/compiler/tests",
    "services/trainer/tests/test_group.py",
    "services/trainer/tests/test_parallel.py",
    "services/common/program/tests/test_parallel.py",
)
"""Of files that two processes share out: the last one to begin should not be one of these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, in the order in which they are named."""

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))

    items.sort(key=rank)


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them ignore Ctrl-C, and `nohup` the end of a terminal; programs
    that they start inherit it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A file with nothing to do by default, because its tests are slow or lack a library, is no failure.

    Pants runs one file at a time, and takes pytest's exit code for "no tests ran" as one.
    """
    options = session.config.option
    is_default = options.markexpr in session.config.getini("addopts") and not options.keyword
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_left_out = reporter is not None and (reporter.stats.get("deselected") or reporter.stats.get("skipped"))
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_default and is_left_out:
        session.exitstatus = pytest.ExitCode.OK
