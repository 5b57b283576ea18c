"""Metrics of a run: their reduction over workers, and lines that cannot be read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import generate_latest

from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.process.stop_reason import StopReason
from services.common.program.process_group import ProcessGroup
from services.common.testing.strange_files import replace_by
from services.trainer.agreement.step_agreement import AgreedStep, WorkerStep
from services.trainer.inspection.doctor import check_run_folder
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import EVENTS_FILE, EventTail, Kind, warnings_of
from services.trainer.metrics.metric_table import METRICS, ReducedNumbers, WorkerNumbers
from services.trainer.metrics.prometheus import NewestMetrics
from services.trainer.metrics.recorder import MetricsRecorder
from services.trainer.metrics.records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    MetricsWriter,
    StepRecord,
    StepsNewestFirst,
    known_metrics,
    read_attempts,
    read_metrics,
)
from services.trainer.metrics.tensorboard import TensorBoard
from services.trainer.report.run_report import write_report
from services.trainer.run import open_run, summarize
from services.trainer.supervise import supervise
from services.trainer.tests import work
from services.trainer.tests.builders import make_program
from services.trainer.tests.metric_lines import ATTEMPT, STEP, append

HEALTH = ("clipped_share", "gradient_norm_by_group", "update_ratio_by_group", "largest_logit", "activation_rms")
ALONE = WorkerEnvironment(rank=0, world_size=1)

BAD_LABELLED: list[Any] = [
    *(1.0, [], {"": 1.0}, {"a": "1"}, {"a": None}, {"\0": 1.0}, {"\ud800": 1.0}, {"a": {}}, {"a": 1e308}),
]
NOT_OBJECTS = [b"", b"\xff\xfe", b'{"step": 1', b"7", b"[]", b"null", b"{}", b"[" * 100_000]
BAD_STEPS: list[bytes] = [
    *NOT_OBJECTS,
    *(json.dumps({**STEP, **change}).encode() for change in (
        {"step": "3"}, {"step": -1}, {"step": 10**400}, {"step": True}, {"step": float("nan")}, {"loss": None},
        {"step_seconds": float("nan")}, {"step_seconds": -1.0}, {"time": 1e300}, {"validation_loss": "low"},
        {"loss": 10**400}, {"loss": 1e308}, {"learning_rate": -1e308}, {"step_seconds": 1e308}, {"step_seconds": 0.0},
        {"step_seconds": 5e-324}, {"tokens_per_second": 1e308}, {"mfu": 1e308}, {"peak_rss_bytes": "many"},
        {"straggler_score": None}, {"loss_max": "low"},
    )),
    *(json.dumps({**STEP, "gradient_norm_by_group": value}).encode() for value in BAD_LABELLED),
    json.dumps({name: value for name, value in STEP.items() if name != "learning_rate"}).encode(),
]  # fmt: skip
BAD_ATTEMPTS = [
    *NOT_OBJECTS,
    *(json.dumps({**ATTEMPT, **change}).encode() for change in (
        {"started_at": 1e300}, {"started_at": float("nan")}, {"setup_seconds": -1.0}, {"train_seconds": None},
        {"setup_seconds": 1e308}, {"train_seconds": 1e308}, {"slowest_checkpoint_seconds": 1e308},
    )),
]  # fmt: skip


LAST_STEP = StepRecord(
    step=1,
    loss=5.0,
    gradient_norm=1.0,
    learning_rate=1e-3,
    step_seconds=0.5,
    data_seconds=0.1,
    skipped_steps=0,
    is_first_of_process=False,
    time=1.7e9,
)
FAST = WorkerNumbers(
    gradient_seconds=0.4,
    step_seconds=0.5,
    data_seconds=0.1,
    loss_max=5.0,
    graphs_compiled=0,
    peak_rss_bytes=1e6,
    peak_device_bytes=math.nan,
)


@pytest.mark.parametrize("line", BAD_STEPS)
def test_a_bad_step_is_passed_over_and_counted(tmp_path: Path, line: bytes) -> None:
    for each in (json.dumps(STEP).encode(), line, json.dumps({**STEP, "step": 4}).encode()):
        append(tmp_path / METRICS_FILE, each)

    found = read_metrics(tmp_path)

    assert [record["step"] for record in found.lines] == [3, 4]
    assert found.unreadable == 1


@pytest.mark.parametrize("line", BAD_ATTEMPTS)
def test_a_bad_attempt_is_passed_over_and_counted(tmp_path: Path, line: bytes) -> None:
    for each in (line, json.dumps(ATTEMPT).encode()):
        append(tmp_path / ATTEMPTS_FILE, each)

    found = read_attempts(tmp_path)

    assert (found.lines, found.unreadable) == ([ATTEMPT], 1)


def test_the_losses_of_a_skipped_step_are_no_numbers_and_no_damage(tmp_path: Path) -> None:
    append(tmp_path / METRICS_FILE, json.dumps({**STEP, "loss": float("nan"), "gradient_norm": float("inf")}).encode())
    assert read_metrics(tmp_path).unreadable == 0


def test_bad_lines_fail_neither_training_nor_its_views_which_count_them(
    tmp_path: Path, new_job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    """The command's progress and workers meet bad lines from before and after the run."""
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    for file, lines in ((METRICS_FILE, BAD_STEPS), (ATTEMPTS_FILE, BAD_ATTEMPTS)):
        for line in lines:
            append(job.run_folder / file, line)
    append(job.run_folder / METRICS_FILE, json.dumps({"step": 1}).encode())  # the last one, which progress reads

    supervise(job)

    append(job.run_folder / METRICS_FILE, b"[]")
    run = open_run(job.root, job.run)
    assert [record["step"] for record in StepsNewestFirst(run.folder)] == [3, 2, 1]
    summary = summarize(run)
    assert f"{len(BAD_STEPS) + 2} lines in {job.run_folder / METRICS_FILE}" in summary
    assert f"{len(BAD_ATTEMPTS)} lines in {job.run_folder / ATTEMPTS_FILE}" in summary
    assert f"{len(BAD_STEPS) + 2} lines" in write_report(run).read_text(encoding="utf-8")
    assert "Exception in thread" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def trained(new_shared_job: Callable[..., Job]) -> Job:
    job = new_shared_job(train__max_steps="2", parallel__data_parallel_size="1")
    train(job, ALONE)
    return job


@pytest.mark.parametrize(
    "value",
    [
        *(
            1e308,
            -1e308,
            1e99,
            -1e99,
            5e-324,
            0,
            -0.0,
            1,
            True,
            2**53,
            2**53 + 1,
            10**400,
            math.nan,
            math.inf,
            -math.inf,
        ),
        *("", "inf", "nan", "x" * 5_000, None, [], {}, "<script>", "\ud800", "\0"),
        *({label: 1.0} for label in ("<script>", "\ud800", "\0", "\n", '"', "x" * 5_000)),
        {"group": 1e308},
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_no_value_of_a_line_fails_a_view_of_the_run(
    trained: Job, tmp_path: Path, value: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The value is in each field alone and in all fields together, of steps, attempts and events."""
    folder = Path(shutil.copytree(trained.root, tmp_path / "copy")) / "run" / trained.run
    job = replace(trained, root=tmp_path / "copy")
    newest = NewestMetrics(folder, job.run)
    names = {*STEP, *(metric.name for metric in METRICS)} - {"step"}
    names |= {"validation_loss", "checkpoint_stall_seconds", "productive_seconds", "run_started_at"}
    for number, changed in enumerate([*([name] for name in sorted(names)), sorted(names), ["step"]]):
        line = {**STEP, "mfu": 0.5, "data_share": 0.1, "goodput": 0.5, "restarts": 0, "step": number + 3}
        append(folder / METRICS_FILE, json.dumps({**line, **dict.fromkeys(changed, value)}).encode())
    attempt = {**ATTEMPT, "slowest_checkpoint_seconds": 1.0, "ended_by": "completion"}
    for changed in [*([name] for name in attempt), list(attempt)]:
        append(folder / ATTEMPTS_FILE, json.dumps({**attempt, **dict.fromkeys(changed, value)}).encode())
    event = {"event": "fallback", "attempt": job.attempt, "to_step": 1, "damages": ["x"], "cause": "y", "message": "z"}
    tail = EventTail(job)
    append(folder / EVENTS_FILE, json.dumps(event).encode())
    for kind in get_args(Kind):
        for name in event:
            append(folder / EVENTS_FILE, json.dumps({**event, "event": kind, name: value}).encode())

    run = open_run(job.root, job.run)
    assert summarize(run)
    assert write_report(run).exists()
    assert generate_latest(newest)
    events = tail.read()
    assert warnings_of(events)
    assert [finding.exit_code for finding in check_run_folder(job)] == [0]
    board = TensorBoard(tmp_path / "board")
    for record in StepsNewestFirst(run.folder):
        board.add(record["step"], known_metrics(record))
    board.close()
    backend, first_step = make_program(job.recipe).backend, len(names)
    with (
        MetricsRecorder(job, ProcessGroup(0, 1), backend, first_step) as recorder,
        recorder.step(replace(LAST_STEP, step=first_step + 1), reduce_numbers(FAST), {}),
    ):
        pass
    assert "Traceback" not in capfd.readouterr().err


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


@pytest.mark.parametrize("kind", ["pipe", "link outside", "device that is full"])
def test_a_record_is_held_whatever_lies_at_its_draft(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a" / "run").mkdir(parents=True)
    run_folder = tmp_path / "a" / "run"
    replace_by(kind, run_folder / "metrics.held.partial")
    writer = MetricsWriter(run_folder, first_step=0)

    writer.hold({**STEP, "step": 1})
    writer.close()
    MetricsWriter(run_folder, first_step=1).close()

    assert [record["step"] for record in read_metrics(run_folder).lines] == [1]
    assert sorted(path.name for path in run_folder.iterdir()) == [METRICS_FILE]


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


def test_each_metric_is_reduced_as_the_table_says() -> None:
    fast = WorkerNumbers(1.0, 4.0, 0.5, 2.0, 0, 1e6, math.nan)
    slow = WorkerNumbers(3.0, 4.5, 0.9, 2.5, 2, 3e6, math.nan)
    assert reduce_numbers(fast, slow).fields == {
        "step_seconds": 4.5,
        "data_seconds": 0.9,
        "data_share": 0.2,
        "loss_max": 2.5,
        "peak_rss_bytes": 3e6,
        "gradient_seconds_spread": 2.0,
        "graphs_compiled": 2,
    }
    for loss in (math.nan, math.inf):
        bad = slow._replace(loss_max=loss)
        assert "loss_max" not in reduce_numbers(bad, fast).fields
        assert "loss_max" not in reduce_numbers(fast, bad).fields


def reduce_numbers(*workers: WorkerNumbers) -> ReducedNumbers:
    encoded = [WorkerStep(StopReason.NONE, 0, numbers=each).encode(rank) for rank, each in enumerate(workers)]
    return AgreedStep.decode([max(column) for column in zip(*encoded, strict=True)]).numbers


def test_goodput_and_restarts_go_on_from_the_checkpoint_that_a_start_continues(new_job: Callable[..., Job]) -> None:
    """Steps that are done again count once, and those of the earlier starts still count."""
    settings = {"parallel__data_parallel_size": "1", "checkpoint__interval_steps": "4"}
    train(new_job(train__max_steps="4", **settings), ALONE)
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
