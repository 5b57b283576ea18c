"""The state of a run, its phases, chip-hours and cost, as a reader of its folder sees them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.common.errors import ArtifactError, TryAgain
from services.common.hardware.instance_types import read_instance_types
from services.common.launch.launcher import WorkerEnvironment
from services.common.recipe.schema import Recipe
from services.trainer.job import RUN_FILE, Job
from services.trainer.loop import train
from services.trainer.metrics.commands import (
    COMMANDS_FILE,
    LINE_BYTES,
    LOST_SECONDS,
    read_commands,
    recording_command,
)
from services.trainer.metrics.records import METRICS_FILE, read_last_step
from services.trainer.runs.cost import divide_training
from services.trainer.runs.description import writing_costs
from services.trainer.runs.status import RunStatus, read_status
from services.trainer.tests.metric_lines import BEGAN, make_command

JobBuilder = Callable[..., Job]
ALONE = WorkerEnvironment(rank=0, world_size=1)
NOW = BEGAN + 1_000


def status_of(job: Job, now: float | None = None) -> RunStatus:
    return read_status(job.root, job.run, now)


def on_trainium(job: Job, started_at: datetime | None = None) -> Job:
    """Return the job of a recipe for two nodes of trn1, whose command began at `started_at`."""
    values = job.recipe.model_dump(mode="json")
    values["cluster"] |= {"trainer_instance_type": "trn1.32xlarge", "trainer_workers_per_node": 1}
    values["parallel"] |= {"data_parallel_size": 2}
    recipe = Recipe.model_validate_json(json.dumps(values))
    return replace(job, recipe=recipe, launch="ray", started_at=started_at or job.started_at)


@pytest.mark.parametrize(
    ("error", "state", "exit_code"),
    [
        (None, "done", 0),
        (TryAgain("a node was lost"), "stopped", 75),
        (KeyboardInterrupt(), "stopped", 130),
        (ArtifactError("a corpus is damaged"), "failed", 3),
        (ZeroDivisionError("a bug"), "failed", 1),
    ],
)
def test_the_state_follows_the_exit_code_of_the_newest_command(
    new_job: JobBuilder, error: BaseException | None, state: str, exit_code: int
) -> None:
    job = new_job()
    assert status_of(job).state == read_status(job.root, "no-such-run").state == "not started"
    with pytest.raises(type(error)) if error else nullcontext(), recording_command(job):
        assert status_of(job).state == "running"
        if error:
            raise error

    found = status_of(job)
    assert (found.state, found.exit_code, found.cost) == (state, exit_code, None)  # CPUs have no price
    assert found.error == (str(error) if error else None)


def test_a_command_of_another_node_is_lost_once_its_record_stands_still(new_job: JobBuilder) -> None:
    job = new_job()
    with recording_command(job):
        path = job.run_folder / COMMANDS_FILE
        content = path.read_bytes()
        record = json.loads(content)
        # As the container of another machine wrote it, which cannot be asked whether the process runs.
        path.write_bytes(json.dumps(record | {"node": "another"}).encode().ljust(LINE_BYTES - 1) + b"\n")
        assert status_of(job, record["seen_at"] + LOST_SECONDS - 1).state == "running"
        assert status_of(job, record["seen_at"] + LOST_SECONDS + 1).state == "lost"


@pytest.mark.parametrize("damage", [b'{"attempt": "torn', b"\0" * 40 + b"\n", b"{}\n"])
def test_a_damaged_record_of_a_killed_command_harms_no_later_one(new_job: JobBuilder, damage: bytes) -> None:
    job = new_job()
    with recording_command(job):
        pass
    path = job.run_folder / COMMANDS_FILE
    path.write_bytes(path.read_bytes() + damage)

    with pytest.raises(TryAgain), recording_command(job):
        raise TryAgain("é" * 10_000)  # its characters have several bytes in JSON

    assert [record.exit_code for record in read_commands(job.run_folder)] == [0, 75]


def test_chip_hours_and_cost_count_the_nodes_of_all_commands(new_job: JobBuilder) -> None:
    job, price = new_job(), read_instance_types()["trn1.32xlarge"].dollars_per_hour
    assert price
    for hours, launch in ((3, "ray"), (1, "inline")):  # without a cluster a command holds one node
        with recording_command(replace(on_trainium(job, datetime.now(UTC) - timedelta(hours=hours)), launch=launch)):
            pass

    assert [(each.nodes, each.workers) for each in read_commands(job.run_folder)] == [(2, 2), (1, 2)]
    found = status_of(job)
    assert found.chip_hours == pytest.approx((3 * 2 + 1) * 16, rel=0.01)
    assert found.cost == pytest.approx((3 * 2 + 1) * price, rel=0.01)


def test_a_run_s_costs_count_held_computing_and_lost_node_hours_by_stage(new_job: JobBuilder) -> None:
    """The first command did six steps, of which the newest checkpoint has four, and died an hour after the last one."""
    job = new_job(train__max_steps="6", checkpoint__interval_steps="4")
    trainium = on_trainium(job)
    with recording_command(trainium):
        train(job, ALONE)
    found = status_of(job)
    assert (found.state, found.step, found.checkpoint_step, found.max_steps) == ("done", 6, 6, 6)
    assert (found.tokens, found.seconds_left) == (found.total_tokens, 0)
    assert None not in (found.loss, found.validation_loss, found.tokens_per_second, found.began_at)
    shutil.rmtree(job.checkpoint_collection / "step-00000006")
    record, path = read_commands(job.run_folder)[0], job.run_folder / METRICS_FILE
    steps = [step | {"time": step["time"] - 3_600} for step in map(json.loads, path.read_text().splitlines())]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    killed = {"began_at": record.began_at - 3_600, "ended_at": None, "exit_code": None}
    line = record.model_copy(update=killed).model_dump_json()
    (job.run_folder / COMMANDS_FILE).write_text(f"{line:<{LINE_BYTES - 1}}\n")

    second = replace(trainium, attempt="second", started_at=datetime.now(UTC))
    with writing_costs(second), recording_command(second):
        train(replace(job, attempt="second", started_at=second.started_at), ALONE)

    *others, cost = json.loads((job.run_folder / RUN_FILE).read_text())["costs"]
    assert [each["stage"] for each in others] == ["tokenizer"]
    assert (cost["stage"], cost["chip_hours"]) == ("trainer", pytest.approx(16 * cost["held_node_hours"]))
    newest = read_last_step(job.run_folder)
    assert newest
    redone = steps[5]["productive_seconds"] - steps[3]["productive_seconds"]
    assert newest["redone_seconds"] == pytest.approx(redone)
    assert redone > 0
    assert newest["restart_seconds"] == pytest.approx(3_600, abs=60)
    assert cost["lost_node_hours"] == pytest.approx(2 * (redone + newest["restart_seconds"]) / 3_600)
    assert cost["computing_node_hours"] == pytest.approx(2 * newest["productive_seconds"] / 3_600)
    assert cost["computing_node_hours"] + cost["lost_node_hours"] < cost["held_node_hours"]


def phases_of(*records: Any, events: Any = (), attempts: Any = ()) -> list[tuple[str, float, float]]:
    """Return the name, the start after BEGAN, and the seconds of each phase."""
    found = divide_training(records, events, attempts, NOW)
    return [(each.name, each.started_at.timestamp() - BEGAN, each.seconds) for each in found]


def test_each_second_of_a_run_whose_workers_and_command_were_killed_is_in_one_phase() -> None:
    """The first workers recorded their end before others followed them, and those of the second start were killed."""
    killed = make_command(0, 120)
    finished = make_command(160, 260, ended_at=BEGAN + 260, exit_code=0)
    restarts = [{"event": "restart", "time": BEGAN + at, "attempt": killed.attempt} for at in (70, 100)]
    attempts = [
        {"started_at": BEGAN + start, "setup_seconds": 6, "train_seconds": seconds}
        for start, seconds in ((1, 60), (160, 93))
    ]
    assert phases_of(killed, finished, events=restarts, attempts=attempts) == [
        *(("start", 1, 6), ("train", 7, 60), ("killed", 70, 30), ("killed", 100, 20)),
        *(("start", 160, 6), ("train", 166, 93)),
    ]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"exit_code": 75, "ended_at": BEGAN + 50}, ["failed"]),
        ({"seen_at": NOW - 1}, ["running"]),
        ({"exit_code": 0, "ended_at": BEGAN + 50}, []),  # it found the run complete
    ],
)
def test_a_command_without_a_recorded_start_is_named_by_its_end(fields: dict[str, Any], names: list[str]) -> None:
    assert [each[0] for each in phases_of(make_command(0, 50, **fields))] == names
