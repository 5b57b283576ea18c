"""A stop file, a signal and the time limit each stop a run once, and the strongest request stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.common.errors import Interrupted, MillraceError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.trainer.job import Job
from services.trainer.supervision.stop import (
    STOP_FILE,
    StopConditions,
    clear_stop,
    forget_signals,
    request_stop,
    stopped,
)

ALONE = WorkerEnvironment(rank=0, world_size=1)


@pytest.mark.parametrize("content", [b"", "SIGTERM\r\n".encode("utf-16"), b"NONE"], ids=["empty", "PowerShell", "text"])
def test_a_file_of_any_content_is_a_request_and_is_used_up(new_job: Callable[..., Job], content: bytes) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).write_bytes(content)

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.STOP_FILE

    clear_stop(job.run_folder)
    assert not (job.run_folder / STOP_FILE).exists()
    assert StopConditions(job, ALONE).check() is StopReason.NONE


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (StopReason.PREEMPTION, TryAgain),
        (StopReason.SIGTERM, TryAgain),
        (StopReason.INTERRUPT, Interrupted),
    ],
)
def test_a_signal_of_the_command_has_its_error_and_does_not_stop_the_next_command(
    new_job: Callable[..., Job], reason: StopReason, error: type[MillraceError]
) -> None:
    job = new_job()
    request_stop(job.run_folder, reason)
    assert StopConditions(job, ALONE).check() is reason
    assert StopConditions(job, WorkerEnvironment(rank=1, world_size=2)).check() is StopReason.NONE  # rank 0 looks

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.NONE
    assert type(stopped(reason, 7)) is error


def test_of_several_requests_the_strongest_stays(new_job: Callable[..., Job]) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).touch()
    for reason, expected in (
        (StopReason.STOP_FILE, StopReason.STOP_FILE),
        (StopReason.PREEMPTION, StopReason.PREEMPTION),
        (StopReason.INTERRUPT, StopReason.INTERRUPT),
        (StopReason.PREEMPTION, StopReason.INTERRUPT),
    ):
        request_stop(job.run_folder, reason)
        assert StopConditions(job, ALONE).check() is expected
