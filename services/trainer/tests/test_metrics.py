"""Metrics of a run: their reduction over workers, and lines that cannot be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.process.shutdown import StopReason
from services.trainer.agreement import AgreedStep, WorkerStep
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics import records
from services.trainer.metrics.metric_table import WorkerNumbers
from services.trainer.metrics.recorder import MetricsWriter
from services.trainer.metrics.records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    StepsNewestFirst,
    read_attempts,
    read_metrics,
    read_record_of,
)
from services.trainer.metrics.run_numbers import mean_training_loss
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.tests import work
from services.trainer.tests.builders import train_new
from services.trainer.tests.metric_lines import STEP, append

HEALTH = ("clipped_share", "gradient_norm_by_group", "update_ratio_by_group", "largest_logit", "activation_rms")
ALONE = WorkerEnvironment(rank=0, world_size=1)

BAD_LINES = [
    *(b"", b"\0" * 64, b"\xff\xfe", b'{"step": 1', b"7", b"[]", b"null", b"{}"),
    json.dumps({name: value for name, value in STEP.items() if name != "learning_rate"}).encode(),
]
"""What an interrupted write, a full disk or a person leaves in a file of records."""


def test_a_torn_last_line_is_dropped_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(json.dumps(STEP).encode() + b'\n{"step": 4, "lo')
    assert read_metrics(tmp_path).unreadable == 0

    writer = MetricsWriter(tmp_path, first_step=3)
    writer.log({**STEP, "step": 4})
    writer.close()

    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [3, 4]


def test_bad_lines_fail_neither_training_nor_the_summary_which_counts_them(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    for line in BAD_LINES:
        append(job.run_folder / METRICS_FILE, line)

    train(job, ALONE)

    append(job.run_folder / METRICS_FILE, b"[]")
    run = open_run(job.root, job.run)
    assert [record["step"] for record in StepsNewestFirst(run.folder)] == [3, 2, 1]
    assert [record["step"] for record in read_metrics(run.folder).lines] == [1, 2, 3]
    append(run.folder / ATTEMPTS_FILE, b"{}")
    assert read_attempts(run.folder).unreadable == 1
    assert run.unreadable[METRICS_FILE] == len(BAD_LINES) + 1
    assert f"{len(BAD_LINES) + 1} lines in {job.run_folder / METRICS_FILE}" in summarize(run)


@pytest.mark.parametrize("block_bytes", [7, 2**16])
def test_steps_are_read_from_the_end_in_blocks_without_those_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    for step in (1, 2, 3, 4, 3, 4, 5, 3):
        append(tmp_path / METRICS_FILE, json.dumps({**STEP, "step": step, "loss": step}).encode())

    assert [record["step"] for record in read_metrics(tmp_path).lines] == [1, 2, 3]
    assert [(read_record_of(tmp_path, step) or {}).get("step") for step in (0, 1, 2, 9)] == [None, 1, 2, 3]


@pytest.mark.parametrize(
    ("logged", "resumed_after", "found"),
    [([1, 2], 3, [1, 2, 3]), ([1, 2], 2, [1, 2]), ([1, 2, 3], 3, [1, 2, 3])],
    ids=["killed before it was logged", "its checkpoint was not committed", "killed right after it was logged"],
)
def test_the_record_of_a_step_with_a_checkpoint_survives_a_kill_while_it_is_evaluated(
    tmp_path: Path, logged: list[int], resumed_after: int, found: list[int]
) -> None:
    def record(step: int, **more: float) -> dict[str, Any]:
        return {**STEP, "step": step, **more}

    killed = MetricsWriter(tmp_path, first_step=0)
    for step in logged:
        killed.log(record(step, validation_loss=1.0))
    killed.hold(record(3))

    MetricsWriter(tmp_path, first_step=resumed_after).close()
    MetricsWriter(tmp_path, first_step=resumed_after).close()

    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == found
    assert all("validation_loss" in line for line in lines if line["step"] in logged)


@pytest.mark.parametrize(("num_steps", "counted"), [(0, 0), (1, 1), (25, 20), (250, 100)])
def test_the_mean_loss_is_that_of_the_last_whole_batches(num_steps: int, counted: int) -> None:
    found = mean_training_loss([{"step": step, "loss": float(step)} for step in range(1, num_steps + 1)])
    assert found.get("loss_steps", 0) == counted
    assert found.get("loss", 0) == (num_steps - (counted - 1) / 2 if counted else 0)
    assert ("loss_standard_error" in found) is (counted > 1)


def test_metrics_of_four_workers_on_two_nodes_reduce_to_what_one_worker_computes(new_job: Callable[..., Job]) -> None:
    options = {"train__max_steps": "3", "train__health_interval_steps": "2"}
    alone = new_job("alone", parallel__data_parallel_size="1", **options)
    shared = new_job("shared", parallel__data_parallel_size="4", **options)
    train(alone, ALONE)
    run_workers(inline, work.train_on_two_nodes, shared, WorkerGroupSpec(4, 1, 4, shared.run_folder))

    one, four = (read_metrics(job.run_folder).lines for job in (alone, shared))
    for name in ("loss", "loss_max", "gradient_norm", "learning_rate", "tokens", "skipped_steps", "restarts"):
        assert [record[name] for record in one] == [record[name] for record in four], name
    for name in HEALTH:
        assert [record.get(name) for record in one] == [record.get(name) for record in four], name
        assert [name in record for record in one] == [False, True, True], name
    for record in one + four:
        assert record["loss"] < record["loss_max"] < 1.5 * record["loss"]
        assert 0 < record["data_seconds"] < record["step_seconds"]
        assert 0 <= record["goodput"] < 1
        assert record["gradient_seconds_spread"] >= 0
    assert all(record["gradient_seconds_spread"] == 0 for record in one)
    assert [("mfu" in record, "mean_tokens_per_second" in record) for record in four] == [(False, False)] + 2 * [
        (True, True)
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_finite_loss_of_one_worker_hides_no_other_of_another(loss: float) -> None:
    finite = WorkerNumbers(1.0, 4.0, 0.5, 2.0, 0, 1e6, math.nan)
    for workers in ((finite, finite._replace(loss_max=loss)), (finite._replace(loss_max=loss), finite)):
        encoded = [WorkerStep(StopReason.NONE, 0, numbers=each).encode(rank) for rank, each in enumerate(workers)]
        agreed = AgreedStep.decode([max(column) for column in zip(*encoded, strict=True)])
        assert "loss_max" not in agreed.numbers.fields


def test_goodput_and_restarts_go_on_from_the_checkpoint_that_a_start_continues(new_job: Callable[..., Job]) -> None:
    """Steps that are done again count once, and those of the earlier starts still count."""
    settings = {"parallel__data_parallel_size": "1", "checkpoint__interval_steps": "4"}
    train_new(new_job, train__max_steps="4", **settings)
    job = new_job(train__max_steps="8", **settings)
    lost = {**read_metrics(job.run_folder).lines[-1], "step": 5, "productive_seconds": 1e6}
    append(job.run_folder / METRICS_FILE, json.dumps(lost).encode())
    train(job, ALONE)

    records = read_metrics(job.run_folder).lines
    assert [record["restarts"] for record in records] == [0] * 4 + [1] * 4
    assert len({record["run_started_at"] for record in records}) == 1
    productive = [record["step_seconds"] for record in records if not record["is_first_of_process"]]
    assert records[-1]["productive_seconds"] == pytest.approx(sum(productive))
    assert len(productive) == 6
