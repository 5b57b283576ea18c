"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest

# With more threads than cores, OpenMP's threads spin while they wait for one another: a sample of text took 6 s of CPU
# instead of 0.2. Set here, because other conftest.py files import torch before any function is called.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise every simulated account makes 1,300 machine images for every region that is used, 0.3 s per region.
os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
# `git rebase --exec` and hooks name their repository here, and commits of the tests would go into it.
for _name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"):
    os.environ.pop(_name, None)


LONGEST = (
    "tests/integration/test_pipeline.py",
    "services/trainer/tests/test_command.py",
    "services/common/program/tests/test_parallel.py",
    "services/tokenizer/tests/test_crash.py",
    "services/compiler/tests",
    "services/trainer/tests/test_parallel.py",
)
"""Longest test files. Two processes share the files, and should not end with one of these."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without collecting garbage, and let later collections leave the imported modules out.

    Imports make no garbage. The search for it took 4 of the 15 s of CPU in which all files of tests are imported, and a
    search among all modules takes 0.5 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, in the order of LONGEST."""

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))

    items.sort(key=rank)


def pytest_configure() -> None:
    """Restore the default actions of SIGINT and SIGHUP, which shells ignore in the background and under `nohup`, and
    which the programs of the tests would inherit.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a file pass whose tests are all left out by default, because they are slow or lack a library.

    Pants runs one file at a time, and treats pytest's exit code for "no tests ran" as a failure.
    """
    options = session.config.option
    is_default = options.markexpr in session.config.getini("addopts") and not options.keyword
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_left_out = reporter is not None and (reporter.stats.get("deselected") or reporter.stats.get("skipped"))
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_default and is_left_out:
        session.exitstatus = pytest.ExitCode.OK
