"""The phases of a run's training: nobody who was killed recorded an end, and the time counts all the same."""

from __future__ import annotations

from typing import Any

import pytest

from services.trainer.metrics.commands import CommandRecord
from services.trainer.runs.cost import divide_training
from services.trainer.tests.metric_lines import BEGAN, make_command

NOW = BEGAN + 1_000


def restart_of(command: CommandRecord, at: float) -> dict[str, Any]:
    return {"event": "restart", "time": BEGAN + at, "attempt": command.attempt}


def attempt_of(started: float, setup_seconds: float, train_seconds: float) -> dict[str, Any]:
    return {"started_at": BEGAN + started, "setup_seconds": setup_seconds, "train_seconds": train_seconds}


def phases_of(*records: Any, events: Any = (), attempts: Any = ()) -> list[tuple[str, float, float]]:
    """Return the name, the begin after BEGAN, and the seconds of each phase."""
    found = divide_training(records, events, attempts, NOW)
    return [(each.name, each.started_at.timestamp() - BEGAN, each.seconds) for each in found]


def test_a_run_whose_worker_and_whose_command_were_killed_has_the_time_of_both() -> None:
    killed = make_command(0, 120)
    finished = make_command(160, 260, ended_at=BEGAN + 260, exit_code=0)
    found = phases_of(killed, finished, events=[restart_of(killed, 70)], attempts=[attempt_of(160, 6, 93)])
    assert found == [("killed", 0, 70), ("killed", 70, 50), ("start", 160, 6), ("train", 166, 93)]


def test_workers_that_recorded_their_end_count_once_although_others_follow_them() -> None:
    command = make_command(0, 200, ended_at=BEGAN + 200, exit_code=0)
    attempts = [attempt_of(1, 5, 60), attempt_of(70, 5, 120)]
    found = phases_of(command, events=[restart_of(command, 70)], attempts=attempts)
    assert [each[:2] for each in found] == [("start", 1), ("train", 6), ("start", 70), ("train", 75)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"exit_code": 75, "ended_at": BEGAN + 50}, "failed"),
        ({"seen_at": NOW - 1}, "running"),
    ],
)
def test_a_command_without_a_recorded_start_is_named_by_its_end(fields: dict[str, Any], name: str) -> None:
    assert [each[0] for each in phases_of(make_command(0, 50, **fields))] == [name]


def test_a_command_that_found_the_run_complete_has_no_phase() -> None:
    assert phases_of(make_command(0, 1, ended_at=BEGAN + 1, exit_code=0)) == []
