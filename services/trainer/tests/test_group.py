"""Groups of workers: what one does while others wait, what they notice, and how they become fewer and more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.common.errors import DeviceError, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.trainer.data import sample_indices
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1)
STEPS = 20
EVERY_FOUR = {"checkpoint__interval_steps": "4", "checkpoint__keep_latest": "10"}


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


def samples_of_committed_steps(job: Job, attempts: list[str]) -> dict[int, Counter[int]]:
    """Return the samples that workers read for each step, in the last attempt that took the step."""
    lines = [json.loads(line) for line in (job.run_folder / work.AUDIT).read_text(encoding="utf-8").splitlines()]
    found: dict[int, Counter[int]] = {}
    for attempt in attempts:
        of_attempt: dict[int, Counter[int]] = {}
        for line in lines:
            if line["attempt"] == attempt:
                of_attempt.setdefault(line["step"], Counter()).update(line["samples"])
        found |= of_attempt
    return found


def test_four_workers_of_which_one_is_killed_in_a_save_become_two_and_four_again(new_job: Callable[..., Job]) -> None:
    """The last four workers are preempted, and all stop after the same step."""
    if torch.__version__ < "2.10":
        pytest.skip("torch 2.9's gloo damages the heap of one of four workers now and then")
    attempts: list[str] = []

    def run(function: Callable[[Job, WorkerEnvironment], None], size: int, max_steps: int = STEPS) -> Job:
        shared = {"parallel__data_parallel_size": str(size), "parallel__zero_stage": "1"}
        job = new_job("elastic", **EVERY_FOUR, **shared, train__max_steps=str(max_steps))
        attempts.append(job.attempt)
        run_workers(inline, function, job, WorkerGroupSpec(size, 1, size, job.run_folder))
        return job

    root = new_job("elastic").root
    with pytest.raises(WorkersLost):
        run(work.train_and_die_in_a_save, 4)
    assert list(checkpoints(root)) == ["step-00000004"]

    run(work.train_audited, 2, max_steps=12)
    assert list(checkpoints(root)) == [f"step-{step:08d}" for step in (4, 8, 12)]

    with pytest.raises(TryAgain, match="preemption after step 15") as raised:
        run(work.train_until_preempted, 4)
    assert raised.value.exit_code == 75
    assert len(list(checkpoints(root)["step-00000015"].glob("shard-*"))) == 4
    job = run(work.train_audited, 4)

    ends = [(each["ended_by"], each["first_step"], each["last_step"]) for each in read_attempts(job.run_folder).lines]
    assert ends == [("completion", 4, 12), ("preemption", 12, 15), ("completion", 15, 20)]
    straight = new_job("straight", **EVERY_FOUR)
    train(straight, ALONE)
    for name in ("step", "loss", "gradient_norm"):
        found, expected = ([record[name] for record in read_metrics(each.run_folder).lines] for each in (job, straight))
        assert found == expected, name
    assert state_hash(checkpoints(root)["step-00000020"]) == state_hash(checkpoints(straight.root)["step-00000020"])

    size, seed = job.recipe.batch.global_batch_size, job.recipe.train.seed
    num_samples = job.corpus.payload.num_samples("train")
    audited = samples_of_committed_steps(job, attempts)
    assert sorted(audited) == list(range(STEPS))
    for step, samples in audited.items():
        assert samples == Counter(sample_indices(num_samples, seed, step * size, size).tolist()), step
