"""The metrics of a run: what a view of them fails of, and lines that nobody can read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from services.common.artifacts.lease import hold_lease
from services.common.launch.launcher import WorkerEnvironment
from services.trainer import tensorboard
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics import ATTEMPTS_FILE, METRICS_FILE, MetricsWriter, read_attempts, read_metrics
from services.trainer.report import write_report
from services.trainer.run import open_run, summarize
from services.trainer.supervise import supervise

ALONE = WorkerEnvironment(rank=0, world_size=1, launch="inline")

STEP = {
    "step": 3,
    "loss": 5.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "step_seconds": 0.5,
    "data_seconds": 0.1,
    "skipped_steps": 0,
    "is_first_of_process": False,
    "time": 1.6e9,
    "step_tokens": 128,
    "tokens": 384,
    "tokens_per_second": 256.0,
}
ATTEMPT = {
    "started_at": 1.6e9,
    "setup_seconds": 1.0,
    "train_seconds": 2.0,
    "graphs_compiled": 0,
    "new_cache_files": 0,
}
NOT_OBJECTS = [b"", b"\xff\xfe", b'{"step": 1', b"7", b"[]", b"null", b"{}", b"[" * 100_000]
BAD_STEPS = [
    *NOT_OBJECTS,
    *(json.dumps({**STEP, **change}).encode() for change in (
        {"step": "3"}, {"step": -1}, {"step": 10**400}, {"step": True}, {"step": float("nan")}, {"loss": None},
        {"step_seconds": float("nan")}, {"step_seconds": -1.0}, {"time": 1e300}, {"validation_loss": "low"},
        {"loss": 10**400},
    )),
    json.dumps({name: value for name, value in STEP.items() if name != "learning_rate"}).encode(),
]  # fmt: skip
BAD_ATTEMPTS = [
    *NOT_OBJECTS,
    *(json.dumps({**ATTEMPT, **change}).encode() for change in (
        {"started_at": 1e300}, {"started_at": float("nan")}, {"setup_seconds": -1.0}, {"train_seconds": None},
    )),
]  # fmt: skip


def append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")


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
    """Through the command's own progress and workers, with lines that were there before and come after."""
    job = new_job(train__max_steps="3", parallel__data_parallel_size="1")
    for file, lines in ((METRICS_FILE, BAD_STEPS), (ATTEMPTS_FILE, BAD_ATTEMPTS)):
        for line in lines:
            append(job.run_folder / file, line)
    append(job.run_folder / METRICS_FILE, json.dumps({"step": 1}).encode())  # the last one, which progress reads

    with hold_lease(tmp_path / "command.lock") as held:
        supervise(job, held)

    append(job.run_folder / METRICS_FILE, b"[]")
    run = open_run(job.root, job.run)
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    summary = summarize(run)
    assert f"{len(BAD_STEPS) + 2} unreadable lines in {job.run_folder / METRICS_FILE}" in summary
    assert f"{len(BAD_ATTEMPTS)} unreadable lines in {job.run_folder / ATTEMPTS_FILE}" in summary
    assert f"{len(BAD_STEPS) + 2} unreadable lines" in write_report(run).read_text(encoding="utf-8")
    assert "Exception in thread" not in capfd.readouterr().err


def events_in(folder: Path) -> Iterator[Event]:
    """What TensorBoard would read from the files of a run."""
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


def test_tensorboard_shows_every_step_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({"step": step, "loss": 4.0 / step, "note": 1})
        assert scalars_in(tmp_path / "tensorboard") == {each: {"loss": 4.0 / each} for each in range(1, step + 1)}
    writer.close()
    assert next(events_in(tmp_path / "tensorboard")).file_version == "brain.Event:2"


def test_a_folder_for_tensorboard_that_cannot_be_made_stops_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensorboard, "RETRY_SECONDS", 0.0)
    (tmp_path / "tensorboard").write_text("not a folder")
    writer = MetricsWriter(tmp_path, first_step=0)
    for step in (1, 2):
        writer.log({**STEP, "step": step})
    (tmp_path / "tensorboard").unlink()
    writer.log({**STEP, "step": 3})
    writer.close()

    assert [record["step"] for record in read_metrics(tmp_path).lines] == [1, 2, 3]
    assert list(scalars_in(tmp_path / "tensorboard")) == [3]
    assert caplog.text.count("TensorBoard's events cannot be written") == 1


def test_a_file_system_that_fails_while_events_are_written_stops_no_run(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="40")
    folder = job.run_folder / "tensorboard"
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4k tmpfs '{folder}' 2>/dev/null") != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        train(job, ALONE)  # its events do not fit
        log = (job.run_folder / "logs" / "rank-00000.log").read_text(encoding="utf-8")
    finally:
        os.system(f"umount '{folder}'")
    assert log.count("TensorBoard's events cannot be written: No space left on device") == 1
    assert [record["step"] for record in read_metrics(job.run_folder).lines] == list(range(1, 41))


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
