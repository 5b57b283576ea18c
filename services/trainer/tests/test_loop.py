"""Training in this process: resume, damage, poisoned gradients, retention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from services.common.artifacts.checkpoint import WEIGHTS
from services.common.artifacts.manifest import MANIFEST
from services.common.errors import ArtifactError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.step import Program
from services.trainer.checkpoint import discard_old, newest_checkpoint
from services.trainer.job import Job, completed_step
from services.trainer.loop import train
from services.trainer.metrics import read_metrics
from services.trainer.node_staging import newest_checkpoint_on_node
from services.trainer.stop import STOP_FILE
from services.trainer.tests.runs import checkpoints, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1, launch="inline")


def _losses(job: Job) -> list[float]:
    return [record["loss"] for record in read_metrics(job.run_folder).lines]


def test_the_loss_falls(new_job: Callable[..., Job]) -> None:
    job = new_job()
    train(job, ALONE)
    losses = _losses(job)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5


def test_a_run_made_longer_continues_as_if_it_had_been_long_from_the_start(new_job: Callable[..., Job]) -> None:
    straight = new_job("straight")
    train(straight, ALONE)
    train(new_job("split", train__max_steps="7"), ALONE)
    split = new_job("split")
    train(split, ALONE)
    assert split.run == straight.run
    assert _losses(split) == _losses(straight)
    assert state_hash(checkpoints(split.root)["step-00000020"]) == state_hash(
        checkpoints(straight.root)["step-00000020"]
    )


def test_intervals_and_worker_counts_do_not_make_another_run_but_the_seed_does(new_job: Callable[..., Job]) -> None:
    run = new_job().run
    assert new_job(checkpoint__interval_steps="3", parallel__data_parallel_size="4", train__max_steps="50").run == run
    assert new_job(train__seed="1").run != run
    assert new_job(optimizer__learning_rate="2e-2").run != run


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_that_was_verified_is_verified_again_when_workers_were_lost(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    assert completed_step(newest_checkpoint_on_node(job)) == 10

    _flip_a_bit(checkpoints(job.root)["step-00000010"] / WEIGHTS)

    assert completed_step(newest_checkpoint_on_node(replace(job, start_number=1))) == 5


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "file removed", "manifest torn"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_made_again(new_job: Callable[..., Job], damage: str) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    expected = state_hash(checkpoints(job.root)["step-00000010"])
    newest = job.checkpoint_address(10).path
    match damage:
        case "flipped bit":
            _flip_a_bit(newest / "weights.safetensors")
        case "truncated":
            (newest / "moments.safetensors").write_bytes((newest / "moments.safetensors").read_bytes()[:-1])
        case "file removed":
            (newest / "weights.safetensors").unlink()
        case "manifest torn":
            (newest / MANIFEST).write_bytes((newest / MANIFEST).read_bytes()[:100])

    found = newest_checkpoint(job.checkpoint_collection)
    train(job, ALONE)

    assert completed_step(found) == 5
    assert "passing over a damaged checkpoint" in (job.run_folder / "logs" / "rank-00000.log").read_text()
    assert state_hash(checkpoints(job.root)["step-00000010"]) == expected
    assert completed_step(newest_checkpoint(job.checkpoint_collection)) == 10


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    for checkpoint in checkpoints(job.root).values():
        _flip_a_bit(checkpoint / "weights.safetensors")
    with pytest.raises(ArtifactError, match="all 2 checkpoints are damaged"):
        train(job, ALONE)


def test_the_newest_checkpoints_are_kept_and_those_at_the_long_interval(new_job: Callable[..., Job]) -> None:
    job = new_job(checkpoint__interval_steps="2", checkpoint__keep_interval_steps="6")
    train(job, ALONE)
    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (6, 12, 18, 20)]


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(new_job: Callable[..., Job]) -> None:
    job = new_job(checkpoint__interval_steps="2", train__max_steps="8", checkpoint__keep_latest="10")
    train(job, ALONE)
    for step in (4, 6):
        _flip_a_bit(job.checkpoint_address(step).path / "moments.safetensors")
    policy = job.recipe.checkpoint.model_copy(update={"keep_latest": 2})

    assert job.lease
    discard_old(job.checkpoint_collection, policy, committed_step=8, lease=job.lease)
    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (2, 4, 6, 8)]

    train(new_job(checkpoint__interval_steps="2", train__max_steps="10"), ALONE)
    assert list(checkpoints(job.root)) == ["step-00000008", "step-00000010"]  # and the older damaged ones may go


def test_damaged_later_checkpoints_do_not_push_out_the_intact_ones(new_job: Callable[..., Job]) -> None:
    job, shorter = new_job("a"), new_job("b", train__max_steps="10")
    train(job, ALONE)
    train(shorter, ALONE)
    for step in (15, 20):
        _flip_a_bit(job.checkpoint_address(step).path / "weights.safetensors")
    for step in (5, 10):
        shorter.checkpoint_address(step).path.rename(job.checkpoint_address(step).path)

    assert job.lease
    discard_old(job.checkpoint_collection, job.recipe.checkpoint, committed_step=10, lease=job.lease)

    assert completed_step(newest_checkpoint(job.checkpoint_collection)) == 10


def test_a_poisoned_step_is_skipped_and_counted_and_the_run_goes_on(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job()
    weights_before: dict[int, torch.Tensor] = {}
    healthy = Program.train_step

    def poisoned_at_step_8(
        program: Program, step: int, micro_batches: list[torch.Tensor], skipped_steps: int
    ) -> object:
        weights_before[step] = torch.cat([bucket.weights_P for bucket in program.buckets])
        if step != 8:
            return healthy(program, step, micro_batches, skipped_steps)
        program.buckets[0].weights_P[0] = float("nan")  # the embedding of token 0
        result = healthy(program, step, [torch.zeros_like(batch) for batch in micro_batches], skipped_steps)
        program.buckets[0].weights_P[0] = weights_before[step][0]
        return result

    monkeypatch.setattr(Program, "train_step", poisoned_at_step_8)
    train(job, ALONE)

    skipped = [record["skipped_steps"] for record in read_metrics(job.run_folder).lines]
    assert skipped == [0] * 8 + [1] * 12
    assert torch.equal(weights_before[8], weights_before[9])
    newest = newest_checkpoint(job.checkpoint_collection)
    assert newest is not None
    assert newest.manifest.checkpoint.skipped_steps == 1


def test_a_stop_file_ends_the_run_with_a_checkpoint_and_is_used_up(new_job: Callable[..., Job]) -> None:
    job = new_job()
    (job.run_folder / STOP_FILE).touch()
    with pytest.raises(TryAgain, match="stop file after step 1"):
        train(job, ALONE)
    assert list(checkpoints(job.root)) == ["step-00000001"]
    train(job, ALONE)
    assert "step-00000020" in checkpoints(job.root)


def test_the_time_limit_ends_the_run_with_a_checkpoint(new_job: Callable[..., Job]) -> None:
    job = new_job(train__time_limit_seconds="5.0")
    begun_long_ago = replace(job, started_at=job.started_at - timedelta(seconds=6))
    with pytest.raises(TryAgain, match="time limit after step 1"):
        train(begun_long_ago, ALONE)
    assert list(checkpoints(job.root)) == ["step-00000001"]


def test_metrics_have_every_step_once_after_steps_were_done_twice(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="8")
    train(job, ALONE)
    (job.checkpoint_address(8).path / MANIFEST).unlink()  # as if killed before the last commit: steps 6 to 8 again
    train(job, ALONE)
    assert [record["step"] for record in read_metrics(job.run_folder).lines] == list(range(1, 9))
