"""A launcher that starts nothing, for tests of what a command does when its workers end in some way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.common.launch.launcher import WorkerGroupSpec
from services.trainer.job import Job


class FakeLauncher:
    """Calls a function of the test in place of the workers, and keeps what the command asked for."""

    def __init__(self, run: Callable[[Job], None]) -> None:
        self._run = run
        self.specs: list[WorkerGroupSpec] = []
        """The groups of workers that the command opened."""
        self.jobs: list[Job] = []
        """The job of each start of the workers."""

    @classmethod
    def use(cls, monkeypatch: pytest.MonkeyPatch, run: Callable[[Job], None] = lambda job: None) -> FakeLauncher:
        """Let commands of this test start their workers with a new fake launcher, and return it."""
        launcher = cls(run)
        monkeypatch.setattr("services.trainer.supervise.choose_launcher", lambda name: launcher)
        return launcher

    @contextmanager
    def open_workers(self, spec: WorkerGroupSpec) -> Iterator[FakeLauncher]:
        self.specs.append(spec)
        yield self

    def run(self, function: Callable[..., Any], job: Job) -> None:
        self.jobs.append(job)
        self._run(job)
