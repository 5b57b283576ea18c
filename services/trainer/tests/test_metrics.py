"""Metrics of a run: their reduction over workers, lines that cannot be read, and views whose failures end no run."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboardX.proto.event_pb2 import Event

from services.common.errors import TryAgain
from services.common.process import telemetry
from services.common.process.shutdown import StopReason
from services.common.process.stage_metrics import PREFIX
from services.trainer.agreement import AgreedStep, WorkerStep
from services.trainer.health.heartbeats import forget_heartbeats, write_heartbeat
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import METRICS, RUN_METRICS, WorkerNumbers
from services.trainer.metrics.prometheus import RunCollector
from services.trainer.metrics.recorder import MetricsWriter
from services.trainer.metrics.records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    read_attempts,
    read_metrics,
    read_record_of,
)
from services.trainer.metrics.run_numbers import mean_training_loss
from services.trainer.metrics.trackers import tracking
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.tests import work
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.metric_lines import STEP, append

HEALTH = ("clipped_share", "gradient_norm_by_group", "update_ratio_by_group", "largest_logit", "activation_rms")

BAD_LINES = [
    *(b"", b"\0" * 64, b"\xff\xfe", b'{"step": 1', b"7", b"[]", b"null", b"{}"),
    json.dumps({name: value for name, value in STEP.items() if name != "learning_rate"}).encode(),
]
"""What an interrupted write, a full disk or a person leaves in a file of records."""


def test_a_torn_last_line_is_dropped_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(json.dumps(STEP).encode() + b'\n{"step": 4, "lo')
    writer = MetricsWriter(tmp_path, first_step=3)
    writer.log({**STEP, "step": 4})
    writer.close()

    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [3, 4]


def test_bad_lines_fail_neither_training_nor_the_summary(new_job: NewJob) -> None:
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    for line in BAD_LINES:
        append(job.run_folder / METRICS_FILE, line)

    train_here(job)

    append(job.run_folder / METRICS_FILE, b"[]")
    run = open_run(job.root, job.run)
    assert [record["step"] for record in read_metrics(run.folder)] == [1, 2, 3]
    append(run.folder / ATTEMPTS_FILE, b"{}")
    assert len(read_attempts(run.folder)) == 1
    assert job.run in summarize(run)


@pytest.mark.parametrize("block_bytes", [7, 2**16])
def test_steps_are_read_from_the_end_in_blocks_without_those_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(telemetry, "BLOCK_BYTES", block_bytes)
    for step in (1, 2, 3, 4, 3, 4, 5, 3):
        append(tmp_path / METRICS_FILE, json.dumps({**STEP, "step": step, "loss": step}).encode())

    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
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


def test_metrics_of_four_workers_on_two_nodes_reduce_to_what_one_worker_computes(new_job: NewJob) -> None:
    options = {"train__max_steps": "3", "train__health_interval_steps": "2"}
    alone = new_job("alone", parallel__data_parallel_size="1", **options)
    shared = new_job("shared", parallel__data_parallel_size="4", **options)
    train_here(alone)
    work.run_group(work.train_on_two_nodes, shared, 4, shared.run_folder)

    one, four = (read_metrics(job.run_folder) for job in (alone, shared))
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


def test_goodput_and_restarts_go_on_from_the_checkpoint_that_a_start_continues(new_job: NewJob) -> None:
    """Steps that are done again count once, and those of the earlier starts still count."""
    settings = {"parallel__data_parallel_size": "1", "checkpoint__interval_steps": "4"}
    train_new(new_job, train__max_steps="4", **settings)
    job = new_job(train__max_steps="8", **settings)
    lost = {**read_metrics(job.run_folder)[-1], "step": 5, "productive_seconds": 1e6}
    append(job.run_folder / METRICS_FILE, json.dumps(lost).encode())
    train_here(job)

    records = read_metrics(job.run_folder)
    assert [record["restarts"] for record in records] == [0] * 4 + [1] * 4
    assert len({record["run_started_at"] for record in records}) == 1
    productive = [record["step_seconds"] for record in records if not record["is_first_of_process"]]
    assert records[-1]["productive_seconds"] == pytest.approx(sum(productive))
    assert len(productive) == 6


def events_in(folder: Path) -> Iterator[Event]:
    """Yield the events that TensorBoard reads from the files of a run."""
    for path in sorted(folder.iterdir()):
        content, position = path.read_bytes(), 0
        while position < len(content):
            (size,) = struct.unpack_from("<Q", content, position)
            yield Event.FromString(content[position + 12 : position + 12 + size])
            position += 12 + size + 4


def scalars_in(folder: Path) -> dict[int, dict[str, float]]:
    return {
        event.step: {value.tag: value.simple_value for value in event.summary.value}
        for event in events_in(folder)
        if event.summary.value
    }


def scrape(collector: RunCollector) -> dict[str, dict[str, float]]:
    """Return the values of each metric by the value of its label, which is empty if the metric has none."""
    labels = {metric.name: metric.label for metric in (*METRICS, *RUN_METRICS)}
    found: dict[str, dict[str, float]] = {name: {} for name in labels}
    for family in collector.collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            assert set(sample.labels) == {"run", labels[name]} - {None}
            found[name][sample.labels.get(labels[name] or "", "")] = sample.value
    return found


def test_tensorboard_shows_every_step_as_soon_as_it_is_logged_and_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({"step": step, "loss": 4.0 / step, "note": 1})
        assert scalars_in(tmp_path / "tensorboard") == {each: {"loss": 4.0 / each} for each in range(1, step + 1)}
    writer.close()
    assert next(events_in(tmp_path / "tensorboard")).file_version == "brain.Event:2"

    (tmp_path / "other").mkdir()
    (tmp_path / "other/tensorboard").write_text("not a folder")
    failing = MetricsWriter(tmp_path / "other", first_step=0)
    for step in (1, 2):
        failing.log({**STEP, "step": step})
    failing.close()
    assert [record["step"] for record in read_metrics(tmp_path / "other")] == [1, 2]
    assert len(caplog.records) == 1


def test_a_labelled_metric_is_an_object_in_the_file_and_a_series_for_each_value_in_the_views(new_job: NewJob) -> None:
    job, name, strange = new_job(), "gradient_norm_by_group", 'a "quoted\\path"\nof two lines, {braces} = ä'
    collector, writer = RunCollector(job), MetricsWriter(job.run_folder, first_step=0)
    writer.log({**STEP, "step": 1, name: {"embedding": 1.0, strange: 3.0}})
    assert scrape(collector)[name] == {"embedding": 1.0, strange: 3.0}
    writer.log({**STEP, "step": 2, name: {"embedding": 2.0}})
    writer.close()
    assert scrape(collector)[name] == {"embedding": 2.0}

    scalars = scalars_in(job.run_folder / "tensorboard")
    shown = [{tag: value for tag, value in scalars[step].items() if name in tag} for step in (1, 2)]
    assert shown == [{f"{name}/embedding": 1.0, f"{name}/{strange}": 3.0}, {f"{name}/embedding": 2.0}]


def test_a_scrape_of_a_run_has_every_metric_of_the_reference(new_job: NewJob) -> None:
    intervals = dict.fromkeys(("train__evaluation_interval_steps", "train__health_interval_steps"), "2")
    job = new_job(parallel__data_parallel_size="1", train__max_steps="4", checkpoint__interval_steps="2", **intervals)
    collector = RunCollector(job)
    train_here(job)
    found = scrape(collector)

    assert {each.field.partition("{")[0] for each in METRICS} <= found.keys()
    assert {name for name, values in found.items() if all(map(math.isnan, values.values()))} == {
        *("slowest_rank", "straggler_score", "peak_device_bytes"),  # of one worker, on a CPU
        "validation_loss_by_source",  # the corpus has none
    }


def test_a_scrape_tells_the_times_of_a_runs_steps_checkpoints_and_heartbeats(new_job: NewJob) -> None:
    job = new_job(parallel__data_parallel_size="2", train__max_steps="40", checkpoint__interval_steps="10")
    collector = RunCollector(job)

    def read(*names: str) -> list[float]:
        found = scrape(collector)
        return [found[name][""] for name in names]

    assert read("checkpoint_step", "checkpoint_interval_steps", "max_steps") == [0, 10, 40]
    assert all(map(math.isnan, read("last_step_time_seconds", "heartbeat_age_seconds")))

    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 4, "time": 1.7e9}).encode())
    record_event(job, "nan", cause="data")
    for rank, age_seconds in enumerate((1, 93)):
        write_heartbeat(job.run_folder, {"rank": rank})
        at = time.time() - age_seconds
        os.utime(job.run_folder / "heartbeats" / f"rank-{rank:05d}.json", (at, at))
    folder = job.checkpoint_collection / "step-00000010"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    os.utime(folder / "manifest.json", (900, 900))

    times = read("heartbeat_age_seconds", "last_step_time_seconds", "checkpoint_step", "checkpoint_time_seconds")
    assert times == [pytest.approx(93, abs=30), 1.7e9, 10, 900]
    assert scrape(collector)["events_total"]["nan"] == 1
    forget_heartbeats(job.run_folder)
    assert math.isnan(*read("heartbeat_age_seconds"))


@pytest.mark.parametrize("fails", [False, True])
def test_wandb_gets_every_new_record_and_its_failure_ends_nothing(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    run = Mock()
    run.log.side_effect = ConnectionError("the network is gone") if fails else None
    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None, origin="fake")
    fake.init = lambda **_: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    append(job.run_folder / METRICS_FILE, json.dumps({**STEP, "step": 1}).encode())

    with pytest.raises(TryAgain), tracking(job, ["wandb"]):  # noqa: PT012 - what a stopped command does
        train_here(job)
        raise TryAgain("stopped")

    assert fails or [call.args[0]["step"] for call in run.log.call_args_list] == [1, 2, 3]
    assert [call.args for call in run.finish.call_args_list] == ([] if fails else [(TryAgain.exit_code,)])
