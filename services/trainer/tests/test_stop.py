"""Whatever lies at the stop file's place stops a run, once; a clock that is set does not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from services.common.errors import Interrupted, MillraceError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.trainer.job import Job
from services.trainer.stop import (
    STOP_FILE,
    StopConditions,
    clear_stop,
    forget_signals,
    request_stop,
    stopped,
)

ALONE = WorkerEnvironment(rank=0, world_size=1)

REQUESTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.touch(),
    "UTF-16, as PowerShell writes it": lambda path: path.write_text("SIGTERM\r\n", encoding="utf-16"),
    "binary": lambda path: path.write_bytes(b"\xff\x00\xfe" * 100),
    "large": lambda path: path.write_bytes(b"SIGTERM" * 2**20),
    "a name that is no signal's": lambda path: path.write_text("NONE"),
    "folder": lambda path: path.mkdir(),
    "link to nowhere": lambda path: path.symlink_to(path.with_name("nowhere")),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("request_by_hand", REQUESTS.values(), ids=REQUESTS)
def test_whatever_lies_there_is_a_request_and_is_used_up(
    new_job: Callable[..., Job], request_by_hand: Callable[[Path], object]
) -> None:
    job = new_job()
    path = job.run_folder / STOP_FILE
    request_by_hand(path)

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.STOP_FILE

    clear_stop(job.run_folder)
    assert not os.path.lexists(path)
    assert StopConditions(job, ALONE).check() is StopReason.NONE


@pytest.mark.parametrize("reason", [StopReason.PREEMPTION, StopReason.SIGTERM, StopReason.INTERRUPT])
def test_a_request_of_the_command_says_which_and_does_not_stop_the_next_command(
    new_job: Callable[..., Job], reason: StopReason
) -> None:
    job = new_job()
    request_stop(job.run_folder, reason)
    assert StopConditions(job, ALONE).check() is reason

    forget_signals(job.run_folder)
    assert StopConditions(job, ALONE).check() is StopReason.NONE


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


def test_workers_with_another_rank_look_for_no_request(new_job: Callable[..., Job]) -> None:
    job = new_job()
    request_stop(job.run_folder, StopReason.SIGTERM)
    assert StopConditions(job, WorkerEnvironment(rank=1, world_size=2)).check() is StopReason.NONE


def test_a_folder_that_is_not_empty_stays_and_every_command_says_why_it_stops(
    new_job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE / "notes").mkdir(parents=True)

    request_stop(job.run_folder, StopReason.SIGTERM)  # as a signal does on top of it
    assert StopConditions(job, ALONE).check() is StopReason.STOP_FILE
    clear_stop(job.run_folder)

    assert str(job.run_folder / STOP_FILE) in str(stopped(StopReason.STOP_FILE, 1, job.run_folder))
    forget_signals(job.run_folder)
    assert str(job.run_folder / STOP_FILE) in caplog.text


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (StopReason.PREEMPTION, TryAgain),
        (StopReason.SIGTERM, TryAgain),
        (StopReason.INTERRUPT, Interrupted),
    ],
)
def test_a_stop_that_left_nothing_behind_says_so_by_its_silence(
    new_job: Callable[..., Job], reason: StopReason, kind: type[MillraceError]
) -> None:
    error = stopped(reason, 7, new_job().run_folder)
    assert isinstance(error, kind)
    assert f"{reason} after step 7" in str(error)
    assert STOP_FILE not in str(error)


def test_a_clock_that_is_set_during_a_run_does_not_end_it_by_its_time_limit(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_conditions = StopConditions(new_job(train__time_limit_seconds="3600.0"), ALONE)

    class AnHourLater(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> AnHourLater:
            return cls.fromtimestamp(time.time() + 3600, tz)

    monkeypatch.setattr("services.trainer.stop.datetime", AnHourLater)

    assert stop_conditions.check() is StopReason.NONE
