"""Two workers: what one does while the other waits, and what they notice of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.errors import DeviceError
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1)


def run_two(function: Callable[[Job, WorkerEnvironment], None], job: Job) -> None:
    run_workers(inline, function, job, WorkerGroupSpec(2, 1, 2, job.run_folder))


def test_set_up_evaluation_and_writing_may_take_longer_than_a_collective(new_job: Callable[..., Job]) -> None:
    overrides = {
        "train__max_steps": "4",
        "train__evaluation_interval_steps": "2",
        "train__evaluation_tokens": str(work.EVALUATION_BATCHES * 2 * 16),
        "checkpoint__interval_steps": "2",
    }
    job, alone = new_job("two", **overrides), new_job("one", **overrides)
    run_two(work.train_slowly, job)
    train(alone, ALONE)

    records, expected = read_metrics(job.run_folder).lines, read_metrics(alone.run_folder).lines
    for name in ("loss", "validation_loss"):
        assert [record.get(name) for record in records] == [record.get(name) for record in expected]
    assert records[3]["checkpoint_stall_seconds"] > 0
    assert [state_hash(path) for path in checkpoints(job.root).values()] == [
        state_hash(path) for path in checkpoints(alone.root).values()
    ]


def test_a_worker_whose_state_differs_ends_the_run_and_its_state_is_not_saved(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="10")
    with pytest.raises(DeviceError, match=r"(?s)step 10.*rank 1 "):
        run_two(work.train_with_a_faulty_worker, job)

    assert list(checkpoints(job.root)) == ["step-00000005"]
    assert read_attempts(job.run_folder).lines == []


def test_workers_on_nodes_of_different_kinds_are_refused_without_a_cache_too(new_job: Callable[..., Job]) -> None:
    job = new_job()
    with pytest.raises(DeviceError, match=r"DNNL_DEFAULT_FPMATH_MODE.*BF16"):
        run_two(work.train_on_unlike_nodes, job)
    with pytest.raises(DeviceError, match="000000000000"):  # than the command's
        train(replace(job, program_fingerprint="0" * 64), ALONE)
    assert not checkpoints(job.root)
