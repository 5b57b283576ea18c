"""With a checkpoint after each step, training waits for no write."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from services.common.launch.launcher import WorkerEnvironment
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_metrics
from services.trainer.tests.runs import checkpoints

ALONE = WorkerEnvironment(rank=0, world_size=1)
RECIPE = {"parallel__data_parallel_size": "1", "train__max_steps": "8", "checkpoint__keep_latest": "8"}


def test_no_commit_waits_for_a_write(new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job, are_written = new_job(**RECIPE, checkpoint__interval_steps="1"), list[bool]()
    write, commit = CheckpointWriter._write, CheckpointWriter._commit

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.02)  # most of a step
        return write(*arguments)

    def note(writer: CheckpointWriter) -> None:
        assert writer._writing
        are_written.append(writer._writing.done())
        commit(writer)

    monkeypatch.setattr(CheckpointWriter, "_write", write_slowly)
    monkeypatch.setattr(CheckpointWriter, "_commit", note)
    train(job, ALONE)

    steps = list(range(1, 9))
    assert list(checkpoints(job.root)) == [f"step-{step:08}" for step in steps]
    assert are_written == [True] * len(steps)
    stalled = [each["step"] for each in read_metrics(job.run_folder).lines if "checkpoint_stall_seconds" in each]
    assert stalled == steps
