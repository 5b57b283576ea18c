"""Runs of 4 workers that share models and optimizer state: their checkpoints continue under any layout."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from services.common.artifacts.checkpoint import INDEX_FILE, CheckpointManifest, shard_name
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import Artifact, open_artifact
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh, make_mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.testing.file_opens import noticing_opens
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.lookup import describe_checkpoint
from services.trainer.conversion.export import export
from services.trainer.job import Job
from services.trainer.metrics.events import read_events
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.run import open_run
from services.trainer.tests import work
from services.trainer.tests.builders import NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, flip_a_bit, problem_of, read_run, state_hash

WHOLE = {"model__num_attention_heads": "4", "model__num_key_value_heads": "2", "checkpoint__interval_steps": "2"}
"""Overrides for a run of one worker, whose model two workers can share."""
SPLIT = {**WHOLE, "parallel__tensor_parallel_size": "2", "parallel__zero_stage": "1"}
SHARED = {**WHOLE, "parallel__data_parallel_size": "4", "parallel__zero_stage": "1"}
HALF, FULL = {"train__max_steps": "2"}, {"train__max_steps": "4"}


ODD = {**WHOLE, "tokenizer__train__vocab_size": "301", "model__vocab_size": "301"}
"""Overrides for a vocabulary that no two workers can share evenly."""
LAYOUTS: list[dict[str, str]] = [
    {"parallel__tensor_parallel_size": "2", "parallel__data_parallel_size": "2", "parallel__zero_stage": "2"},
    {},
    {"parallel__tensor_parallel_size": "4", "parallel__data_parallel_size": "1"},
]


class Runs(NamedTuple):
    new_job: NewJob
    straight: Job
    resumed: Job
    damaged: Job
    shared: Job
    poisoned: Job


@pytest.fixture(scope="module")
def runs(new_shared_job: NewJob) -> Runs:
    """Trained by one group of 4 processes, one after the other."""
    straight, shared = new_shared_job("straight", **SPLIT, **FULL), new_shared_job("shared", **SHARED, **HALF)
    resumed = [new_shared_job("resumed", **SPLIT, **steps) for steps in (HALF, FULL)]
    damaged = [new_shared_job("damaged", **SPLIT, **FULL) for _ in range(2)]
    poisoned = new_shared_job("poisoned", **SPLIT, **HALF, train__evaluation_interval_steps="100")
    jobs = [straight, shared, *resumed, *damaged, poisoned]
    work.run_group(work.train_in_turn, jobs, 4, straight.run_folder)
    return Runs(new_shared_job, straight, resumed[-1], damaged[-1], shared, poisoned)


def losses(job: Job) -> list[float]:
    return [record["loss"] for record in read_metrics(job.run_folder)]


def final_state(job: Job) -> str:
    return state_hash(checkpoints(job.root)["step-00000004"])


def exported(job: Job) -> dict[str, torch.Tensor]:
    """Weights of the newest checkpoint, as a Hugging Face folder has them."""
    folder = job.root / "hugging-face"
    if not folder.exists():
        export(open_run(job.root, job.run), folder)
    return safetensors.torch.load_file(folder / "model.safetensors")


def continue_alone(runs: Runs, job: Job, copy: str) -> Job:
    """The run's state after step 2, continued by one worker."""
    alone = runs.new_job(copy, **WHOLE, **FULL)
    shutil.copytree(job.checkpoint_collection, alone.checkpoint_collection)
    shutil.rmtree(alone.checkpoint_address(4).path, ignore_errors=True)
    train_here(alone)
    return alone


def test_a_resumed_run_of_split_models_has_identical_losses_and_state(runs: Runs) -> None:
    assert losses(runs.resumed) == losses(runs.straight)
    assert final_state(runs.resumed) == final_state(runs.straight)


def test_each_worker_writes_what_it_owns_and_no_other_does(runs: Runs) -> None:
    folder = checkpoints(runs.straight.root)["step-00000004"]
    owned: list[dict[str, Any]] = [safetensors.torch.load_file(folder / shard_name(rank)) for rank in range(4)]
    numbers = [sum(tensor.numel() for tensor in shard.values()) for shard in owned]

    assert sum(numbers) == 3 * runs.straight.recipe.model.num_parameters
    assert max(numbers) < 1.1 * min(numbers)


def test_a_damaged_shard_of_one_worker_lets_all_fall_back_alike(runs: Runs) -> None:
    for rank in range(4):
        log = (runs.damaged.run_folder / "logs" / f"rank-{rank:05d}.log").read_text()
        assert "shard-00002.safetensors: xxh3-128 is" in log
    assert read_run(runs.damaged.root).starts[-1].endswith("step-00000002")
    [event] = read_events(runs.damaged.run_folder)
    assert (event["event"], event["to_step"]) == ("fallback", 2)
    assert "shard-00002.safetensors: xxh3-128 is" in event["damages"][0]
    assert final_state(runs.damaged) == final_state(runs.straight)


def test_a_checkpoint_of_split_models_continues_on_one_worker(runs: Runs) -> None:
    alone = continue_alone(runs, runs.straight, "whole")

    assert losses(alone) == pytest.approx(losses(runs.straight)[2:], rel=2e-6, abs=0)
    ours = exported(alone)
    for name, weight in exported(runs.straight).items():
        torch.testing.assert_close(weight, ours[name], rtol=0, atol=2e-5)


def test_a_checkpoint_of_sharded_optimizers_continues_on_one_worker_bit_for_bit(runs: Runs) -> None:
    continued = continue_alone(runs, runs.shared, "elastic")
    half, straight = (runs.new_job("alone", **WHOLE, **steps) for steps in (HALF, FULL))
    train_here(half)
    ours = exported(half)
    assert all(torch.equal(weight, ours[name]) for name, weight in exported(runs.shared).items())
    train_here(straight)

    assert losses(runs.shared) + losses(continued) == losses(straight)
    assert final_state(continued) == final_state(straight)


def test_gradients_of_one_worker_that_are_not_numbers_skip_the_step_on_all(runs: Runs) -> None:
    records = read_metrics(runs.poisoned.run_folder)
    assert [record["skipped_steps"] for record in records] == [0, 1]
    assert losses(runs.poisoned)[:1] == losses(runs.straight)[:1]
    # Computed again they are no numbers again, also on rank 2, which has the other half of the model.
    [event] = read_events(runs.poisoned.run_folder)
    assert (event["event"], event["cause"], event["step"], event["ranks"]) == ("nan", "data", 2, [2, 3])
    # States were compared before it was saved, and loads nowhere unless all workers skipped alike.
    alone = continue_alone(runs, runs.poisoned, "healthy")
    assert [record["skipped_steps"] for record in read_metrics(alone.run_folder)] == [1] * 2


def opens_of(runs: Runs, copy: str, rank: int, **layout: str) -> tuple[set[str], set[str]]:
    """Return the files of the checkpoint that rank 0 and a worker open to load it in a layout."""
    job = runs.new_job(copy, **SHARED | layout)
    shutil.copytree(runs.shared.checkpoint_collection, job.checkpoint_collection)
    group = ProcessGroup.fake(job.recipe.parallel.num_workers, rank)
    try:
        mesh = make_mesh(job.recipe, rank, group.world_size)
        held = Program(job.recipe, TorchNative(mesh, 1, "exact"), draws_weights=False).state.read()
        with noticing_opens(job.checkpoint_collection) as by_rank_0:
            found, own_shards = find_checkpoint(job, mesh, 2)
        assert found.checkpoint
        with noticing_opens(job.checkpoint_collection) as by_worker:
            assert load_part(job, found.checkpoint, own_shards[rank], held) == ""
    finally:
        group.leave()
    return {path.name for path in by_rank_0.paths}, {path.name for path in by_worker.paths}


def test_a_worker_opens_its_own_shard_and_in_another_layout_the_index_and_those_that_have_its_part(runs: Runs) -> None:
    """So the files that a resume opens do not grow with the square of the number of workers."""
    assert opens_of(runs, "same", 3) == ({MANIFEST}, {shard_name(3)})
    by_rank_0, by_worker = opens_of(runs, "fewer", 1, parallel__data_parallel_size="2")
    assert (by_rank_0, by_worker) == ({MANIFEST}, {MANIFEST, INDEX_FILE, shard_name(2), shard_name(3)})


def test_what_a_worker_is_told_of_a_checkpoint_does_not_grow_with_the_workers(runs: Runs) -> None:
    manifest = open_artifact(runs.straight.checkpoint_address(4).path, CheckpointManifest).manifest
    told_bytes = []
    for workers in (16, 1_024):
        state = manifest.checkpoint.model_copy(update={"data_parallel_size": workers // 2})
        state = state.with_shards(manifest.name, {shard_name(rank): rank for rank in range(workers)})
        files = tuple(replace(manifest.files[0], path=file) for file in (INDEX_FILE, *state.shards))
        written = manifest.model_copy(update={"checkpoint": state, "files": files})
        checkpoint = Artifact(runs.straight.checkpoint_address(4).path, written)

        told, own_shards = describe_checkpoint(checkpoint, runs.straight.recipe, Mesh(0, workers // 2, 2))

        assert [own.entry.path for own in own_shards if own] == [*state.shards]
        told_bytes.append(len(pickle.dumps((told, own_shards[-1]))))
    assert told_bytes[1] - told_bytes[0] < 20
    assert told_bytes[1] < 6_000


def test_a_worker_reads_and_verifies_only_the_shards_that_it_loads(runs: Runs) -> None:
    log = (runs.resumed.run_folder / "logs" / "rank-00000.log").read_text()
    assert "reading 1 of 4 shards" in log

    job = runs.new_job("partly", **SPLIT, **FULL)
    shutil.copytree(runs.straight.checkpoint_collection, job.checkpoint_collection)
    flip_a_bit(job.checkpoint_address(4).path / shard_name(2))
    problems = []
    for rank in range(4):
        group = ProcessGroup.fake(4, rank)
        problems.append(problem_of(job, 4, make_mesh(job.recipe, rank, 4)))
        group.leave()

    # Rank 3 has a part of the matrices of rank 2's model, and with it the norms, which rank 2 writes.
    assert [shard_name(2) in problem for problem in problems] == [False, False, True, True], problems
    assert problems[:2] == ["", ""]


def test_a_run_with_an_odd_vocabulary_goes_on_in_other_layouts_and_exports_no_padding(new_job: NewJob) -> None:
    straight = train_new(new_job, "straight", **ODD, train__max_steps="6")
    jobs = [
        new_job("changed", **ODD, **layout, train__max_steps=str(2 * number))
        for number, layout in enumerate(LAYOUTS, start=1)
    ]
    work.run_group(work.train_in_turn, jobs, 4, jobs[0].run_folder)

    assert losses(jobs[-1]) == pytest.approx(losses(straight), rel=2e-6, abs=0)
    weights = exported(jobs[-1])
    assert {len(weights[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")} == {301}
