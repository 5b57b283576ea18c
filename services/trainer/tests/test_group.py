"""Groups of workers: what they agree on, what one does while others wait, and how they become fewer and more."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.errors import DeviceError, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.process.shutdown import StopReason
from services.common.program.mesh import Axis
from services.common.testing.seeds import draw_seed
from services.trainer.agreement import AgreedStep, WorkerStep
from services.trainer.data import sample_indices
from services.trainer.health.loss_spikes import Deviation
from services.trainer.job import Job
from services.trainer.metrics.metric_table import WorkerNumbers
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests import work
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, state_hash

STEPS = 20
EVERY_FOUR = {"checkpoint__interval_steps": "4", "checkpoint__keep_latest": "10"}


def test_set_up_evaluation_and_writing_may_take_longer_than_a_collective(new_job: NewJob) -> None:
    overrides = {
        "train__max_steps": "4",
        "train__evaluation_interval_steps": "2",
        "train__evaluation_tokens": str(work.EVALUATION_BATCHES * 2 * 16),
        "checkpoint__interval_steps": "2",
    }
    job, alone = new_job("two", **overrides), new_job("one", **overrides)
    work.run_group(work.train_slowly, job, 2, job.run_folder)
    train_here(alone)

    records, expected = read_metrics(job.run_folder), read_metrics(alone.run_folder)
    for name in ("loss", "validation_loss"):
        assert [record.get(name) for record in records] == [record.get(name) for record in expected]
    assert records[3]["checkpoint_stall_seconds"] > 0
    assert [state_hash(path) for path in checkpoints(job.root).values()] == [
        state_hash(path) for path in checkpoints(alone.root).values()
    ]


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        ({}, None),
        ({"parallel__tensor_parallel_size": "2"}, "tensor"),  # a norm
        ({"parallel__tensor_parallel_size": "2"}, "key_value"),  # a copy of a head
    ],
)
def test_a_worker_whose_state_differs_ends_the_run_and_its_state_is_not_saved(
    new_job: NewJob, layout: dict[str, str], axis: Axis | None
) -> None:
    models = {"parallel__data_parallel_size": "1" if axis else "2"}
    job = new_job(**layout, **models, train__max_steps="10")
    with pytest.raises(DeviceError, match=r"(?s)step 10.*rank 1 "):
        work.run_group(work.train_with_a_faulty_worker, (job, axis), 2, job.run_folder)

    assert list(checkpoints(job.root)) == ["step-00000005"]
    assert read_attempts(job.run_folder) == []


def test_workers_on_nodes_of_different_kinds_are_refused_without_a_cache_too(new_job: NewJob) -> None:
    job = new_job()
    with pytest.raises(DeviceError, match=r"DNNL_DEFAULT_FPMATH_MODE.*BF16"):
        work.run_group(work.train_on_unlike_nodes, job, 2, job.run_folder)
    with pytest.raises(DeviceError, match="000000000000"):  # than the command's
        train_here(replace(job, program_fingerprint="0" * 64))
    assert not checkpoints(job.root)


def samples_of_committed_steps(job: Job) -> dict[int, Counter[int]]:
    """Return the samples that workers read for each step, in the last attempt that took the step."""
    lines = [json.loads(line) for line in (job.run_folder / work.AUDIT).read_text(encoding="utf-8").splitlines()]
    last_attempts, found = {line["step"]: line["attempt"] for line in lines}, defaultdict[int, Counter[int]](Counter)
    for line in lines:
        if line["attempt"] == last_attempts[line["step"]]:
            found[line["step"]].update(line["samples"])
    return found


def test_four_workers_of_which_one_is_killed_in_a_save_become_two_and_four_again(new_job: NewJob) -> None:
    """The last four workers are preempted, and all stop after the same step."""
    if torch.__version__ < "2.10":
        pytest.skip("torch 2.9's gloo damages the heap of one of four workers now and then")

    def run(function: Callable[[Job, WorkerEnvironment], None], size: int, max_steps: int = STEPS) -> Job:
        shared = {"parallel__data_parallel_size": str(size), "parallel__zero_stage": "3" if size == 4 else "1"}
        job = new_job("elastic", **EVERY_FOUR, **shared, train__max_steps=str(max_steps))
        work.run_group(function, job, size, job.run_folder)
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

    ends = [(each["ended_by"], each["first_step"], each["last_step"]) for each in read_attempts(job.run_folder)]
    assert ends == [("completion", 4, 12), ("preemption", 12, 15), ("completion", 15, 20)]
    straight = train_new(new_job, "straight", **EVERY_FOUR)
    for name in ("step", "loss", "gradient_norm"):
        found, expected = ([record[name] for record in read_metrics(each.run_folder)] for each in (job, straight))
        assert found == expected, name
    assert state_hash(checkpoints(root)["step-00000020"]) == state_hash(checkpoints(straight.root)["step-00000020"])

    size, seed = job.recipe.batch.global_batch_size, job.recipe.train.seed
    num_samples = job.corpus.payload.num_samples("train")
    audited = samples_of_committed_steps(job)
    assert sorted(audited) == list(range(STEPS))
    for step, samples in audited.items():
        assert samples == Counter(sample_indices(num_samples, seed, step * size, size).tolist()), step


WORKERS = 3


def step(seconds: float = 1.0, **facts: object) -> WorkerStep:
    numbers = WorkerNumbers(seconds, 2 * seconds, 0.5, seconds, 0, 1e6, math.nan)
    return WorkerStep(StopReason.NONE, written_step=6, compared_seconds=seconds, numbers=numbers)._replace(
        **facts  # type: ignore[arg-type]
    )


def agree(*steps: WorkerStep) -> AgreedStep:
    encoded = [each.encode(rank) for rank, each in enumerate(steps)]
    return AgreedStep.decode([max(column) for column in zip(*encoded, strict=True)])


def test_a_step_is_reduced_to_what_the_workers_decide_by() -> None:
    steps = [step(2.0), step(4.0, deviation=Deviation.LOSS), step(3.0, stop_reason=StopReason.SIGTERM)]
    agreed = agree(*steps, step(3.5, written_step=0))

    assert (agreed.stop_reason, agreed.deviation) == (StopReason.SIGTERM, Deviation.LOSS)
    assert (agreed.written_step, agree(*steps).written_step) == (0, 6)
    assert (agreed.is_applied_by_some, agreed.is_skipped_by_some) == (True, False)
    assert (agreed.slowest_rank, agreed.slowest_seconds, agreed.fastest_seconds) == (1, 4.0, 2.0)
    assert agreed.numbers.fields["step_seconds"] == 8.0
    assert agreed.numbers.fields["gradient_seconds_spread"] == 2.0


@pytest.mark.parametrize("rank", [0, 7, 2**22 - 1])
def test_the_slowest_worker_is_named_and_of_equals_the_first(rank: int) -> None:
    slow, fast = step(86_400.0).encode(rank), step(10.0).encode(min(rank, 6))
    assert AgreedStep.decode([max(pair) for pair in zip(slow, fast, strict=True)]).slowest_rank == rank
    assert agree(step(1.0), step(5.0), step(5.0)).slowest_rank == 1


def test_all_workers_stop_after_the_same_step_wherever_the_reason_was_heard(tmp_path: Path) -> None:
    seed = draw_seed()
    hears, at = random.Random(seed).randrange(WORKERS), random.Random(seed).randrange(work.AGREED_STEPS)
    work.run_group(work.agree_in_turns, (tmp_path, hears, at), WORKERS, tmp_path)

    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    assert all(each == found[0] for each in found)
    assert found[0]["stop reasons"].index(StopReason.SIGTERM) == at
    assert f"on rank {hears} " in found[0]["error"]  # the one whose last step had another outcome


def costs_of(num_workers: int, folder: Path) -> dict[str, float]:
    """Return the mean store bytes and descriptors of a worker."""
    folder.mkdir()
    spec = WorkerGroupSpec(num_workers, 1, num_workers, folder, preload=("torch", "services.trainer.tests.work"))
    run_workers(inline, work.count_group_costs, folder, spec)
    counted = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    assert len(counted) == num_workers
    return {name: sum(each[name] for each in counted) / num_workers for name in counted[0]}


@pytest.mark.parametrize(
    "sizes", [(8, 16), pytest.param((16, 32, 64), marks=pytest.mark.slow)], ids=["16 workers", "64 workers"]
)
def test_store_bytes_and_descriptors_of_a_worker_do_not_grow_with_the_workers(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    costs = [costs_of(size, tmp_path / str(size)) for size in sizes]

    for name in ("store bytes", "descriptors"):
        assert costs[-1][name] < 1.1 * costs[0][name], costs
