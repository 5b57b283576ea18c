"""Workers that share the optimizer's state, and become fewer and more: the bits and the samples are those of one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from services.common.errors import TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.trainer.data import sample_indices
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, state_hash

STEPS = 20
EVERY_FOUR = {"checkpoint__interval_steps": "4", "checkpoint__keep_latest": "10"}


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
    train(straight, WorkerEnvironment(rank=0, world_size=1))
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
