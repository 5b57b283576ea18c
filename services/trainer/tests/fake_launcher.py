"""A launcher that starts nothing, for tests of what a command does when its workers end in some way."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import pytest

from services.common.errors import NoRoomForWorkers, WorkersLost
from services.common.launch.launcher import WorkerEnvironment, WorkerGroup
from services.trainer.job import Job


class FakeLauncher:
    """Calls a function of the test in place of the training of all workers, and keeps what the command asked for."""

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self.jobs: list[Job] = []
        """The job of each start of the workers."""

    @classmethod
    def use(cls, monkeypatch: pytest.MonkeyPatch, run: Callable[[Job], None] = lambda job: None) -> FakeLauncher:
        """Let commands of this test start their workers with a new fake launcher, and return it."""
        launcher = cls()

        def train(job: Job, environment: WorkerEnvironment) -> None:
            launcher.jobs.append(job)
            run(job)

        monkeypatch.setattr("services.trainer.supervision.supervise.train", train)
        monkeypatch.setattr("services.trainer.supervision.supervise.choose_launcher", lambda name: launcher)
        return launcher

    def run_workers(self, group: WorkerGroup) -> None:
        """See `Launcher.run_workers`. All workers are lost with the function's `WorkersLost`."""
        self.groups.append(group)
        function, argument = pickle.loads(group.work)
        number = group.restart_policy("")
        while True:
            try:
                function(argument, WorkerEnvironment(0, 1, start_number=number, started_at=time.time()))
                return
            except NoRoomForWorkers:
                raise
            except WorkersLost as lost:
                number = group.restart_policy(str(lost))
