"""How often a command starts its workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.common.errors import NoRoomForWorkers, WorkersLost
from services.trainer.job import Job
from services.trainer.supervise import supervise


@pytest.mark.parametrize(
    ("error", "starts", "message"),
    [
        (WorkersLost("rank 1 was killed"), 3, "workers were lost 3 times, train.max_restarts is 2.*rank 1 was killed"),
        (NoRoomForWorkers("no room for 2"), 1, "^no room for 2$"),
    ],
)
def test_lost_workers_are_started_again_but_not_where_there_is_no_room(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, error: WorkersLost, starts: int, message: str
) -> None:
    started = []

    class Failing:
        def run_workers(self, *arguments: object, **options: object) -> None:
            started.append(options)
            raise error

    monkeypatch.setattr("services.trainer.supervise.choose_launcher", lambda name: Failing())
    job = new_job(train__max_restarts="2")

    with pytest.raises(WorkersLost, match=message):
        supervise(job)

    assert started == [{"shared_folder": job.run_folder}] * starts
