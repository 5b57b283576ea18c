"""Training in this process: resume, damage, poisoned gradients, retention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from services.common.artifacts.checkpoint import shard_name
from services.common.artifacts.manifest import MANIFEST
from services.common.errors import ArtifactError, TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import NOTICE_VARIABLE
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.testing.file_opens import noticing_opens
from services.trainer.checkpoints.loader import resume
from services.trainer.checkpoints.lookup import newest_checkpoint
from services.trainer.checkpoints.retention import discard_left_over, discard_old
from services.trainer.job import Job, completed_step
from services.trainer.loop import train
from services.trainer.metrics.events import EventTail, count_events, warnings_of
from services.trainer.metrics.records import read_metrics
from services.trainer.stop import STOP_FILE
from services.trainer.tests import work
from services.trainer.tests.builders import make_program
from services.trainer.tests.runs import checkpoints, flip_a_bit, problem_of, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1)


def _losses(job: Job) -> list[float]:
    return [record["loss"] for record in read_metrics(job.run_folder).lines]


def test_the_loss_falls(new_job: Callable[..., Job]) -> None:
    job = new_job()
    train(job, ALONE)
    losses = _losses(job)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_run_made_longer_continues_as_if_it_had_been_long_from_the_start(
    new_job: Callable[..., Job], dtype: str
) -> None:
    types = {"train__dtype": dtype, "train__param_dtype": dtype}
    straight = new_job("straight", train__max_steps="8", **types)
    train(straight, ALONE)
    train(new_job("split", train__max_steps="3", **types), ALONE)
    split = new_job("split", train__max_steps="8", **types)
    train(split, ALONE)
    assert split.run == straight.run
    assert _losses(split) == _losses(straight)
    assert state_hash(checkpoints(split.root)["step-00000008"]) == state_hash(
        checkpoints(straight.root)["step-00000008"]
    )


def test_intervals_and_worker_counts_do_not_make_another_run_but_the_seed_does(new_job: Callable[..., Job]) -> None:
    run = new_job().run
    assert new_job(checkpoint__interval_steps="3", parallel__data_parallel_size="4", train__max_steps="50").run == run
    assert new_job(train__seed="1").run != run
    assert new_job(optimizer__learning_rate="2e-2").run != run


def test_a_run_keeps_attention_within_documents_when_its_recipe_says_so(new_job: Callable[..., Job]) -> None:
    jobs = [new_job(mask, train__max_steps="2", train__attention_mask=mask) for mask in ("causal", "block_causal")]
    for job in jobs:
        train(job, ALONE)

    causal, block_causal = (read_metrics(job.run_folder).lines for job in jobs)
    assert jobs[0].run != jobs[1].run
    assert causal[0]["loss"] != block_causal[0]["loss"]  # of the same weights and tokens
    assert causal[1]["validation_loss"] != block_causal[1]["validation_loss"]


def test_a_checkpoint_that_was_verified_is_verified_again_when_workers_were_lost(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    assert problem_of(job, 10) == ""

    flip_a_bit(checkpoints(job.root)["step-00000010"] / shard_name(0))

    assert problem_of(job, 10) == ""  # as this command has found it
    assert "shard-00000.safetensors: xxh3-128 is" in problem_of(replace(job, start_number=1), 10)


@pytest.mark.parametrize(
    "damage",
    [
        "flipped bit",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("truncated", "file removed", "manifest torn")),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_made_again(new_job: Callable[..., Job], damage: str) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    expected = state_hash(checkpoints(job.root)["step-00000010"])
    newest = job.checkpoint_address(10).path
    match damage:
        case "flipped bit":
            flip_a_bit(newest / shard_name(0))
        case "truncated":
            (newest / shard_name(0)).write_bytes((newest / shard_name(0)).read_bytes()[:-1])
        case "file removed":
            (newest / shard_name(0)).unlink()
        case "manifest torn":
            (newest / MANIFEST).write_bytes((newest / MANIFEST).read_bytes()[:100])

    found = newest_checkpoint(job.checkpoint_collection)
    train(job, ALONE)

    assert completed_step(found) == 5
    assert count_events(job.run_folder) == {"fallback": 1}
    assert state_hash(checkpoints(job.root)["step-00000010"]) == expected
    assert completed_step(newest_checkpoint(job.checkpoint_collection)) == 10


def test_a_checkpoint_that_a_node_does_not_see_is_not_passed_over(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is intact: from an older one the run would do again what was done, and remove it in the end."""
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    newest, exists = job.checkpoint_address(10).path, Path.exists
    monkeypatch.setattr(Path, "exists", lambda path, **options: path != newest and exists(path, **options))

    with pytest.raises(ArtifactError, match=newest.name):
        resume(job, make_program(job.recipe), ProcessGroup(0, 1), [5, 10])


def test_a_run_that_resumes_draws_no_initial_weights(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr("services.common.program.step.draw_weights", lambda held, *arguments: drawn.append(len(held)))

    train(new_job(train__max_steps="1"), ALONE)
    assert len(drawn) == 1
    train(new_job(train__max_steps="2"), ALONE)
    assert len(drawn) == 1


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over(new_job: Callable[..., Job]) -> None:
    job = new_job(train__max_steps="10")
    train(job, ALONE)
    for checkpoint in checkpoints(job.root).values():
        flip_a_bit(checkpoint / shard_name(0))
    with pytest.raises(ArtifactError, match=r"2 checkpoints(?s:.*)step-00000010(?s:.*)step-00000005"):
        train(job, ALONE)


def test_the_newest_checkpoints_are_kept_and_those_at_the_long_interval(new_job: Callable[..., Job]) -> None:
    job = new_job(checkpoint__interval_steps="2", checkpoint__keep_interval_steps="6")
    train(job, ALONE)
    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (6, 12, 18, 20)]


def test_a_checkpoint_that_the_notice_of_a_stop_would_not_hold_is_said(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "0.000001")
    job = new_job(train__max_steps="4", checkpoint__interval_steps="2")
    train(job, ALONE)
    assert len(warnings_of(EventTail(job).read())) == 1
    assert count_events(job.run_folder) == {"short_notice": 1}


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(new_job: Callable[..., Job]) -> None:
    job = new_job(checkpoint__interval_steps="2", train__max_steps="8", checkpoint__keep_latest="10")
    train(job, ALONE)
    for step in (4, 6):
        flip_a_bit(job.checkpoint_address(step).path / shard_name(0))
    policy = job.recipe.checkpoint.model_copy(update={"keep_latest": 2})
    recipe = job.recipe.model_copy(update={"checkpoint": policy})

    discard_old(job.checkpoint_collection, recipe, 8, lambda step: step not in (4, 6))
    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (2, 4, 6, 8)]

    train(new_job(checkpoint__interval_steps="2", train__max_steps="10"), ALONE)
    assert list(checkpoints(job.root)) == ["step-00000008", "step-00000010"]  # and the older damaged ones may go


def test_no_old_checkpoint_is_read_when_old_ones_are_removed(new_job: Callable[..., Job]) -> None:
    settings = {"checkpoint__interval_steps": "2", "checkpoint__keep_latest": "3"}
    job = new_job(train__max_steps="4", **settings)
    train(job, ALONE)
    older, newest = (job.checkpoint_address(step).path / shard_name(0) for step in (2, 4))

    with noticing_opens(job.checkpoint_collection) as opens:
        problem_of(job, 4)
        opens_of_a_load = opens.paths.count(newest)
        train(new_job(train__max_steps="8", **settings), ALONE)

    assert list(checkpoints(job.root)) == ["step-00000004", "step-00000006", "step-00000008"]
    assert opens.paths.count(newest) == 2 * opens_of_a_load > 0
    assert opens.paths.count(older) == 0


def test_a_checkpoint_that_was_damaged_at_the_start_does_not_count_among_those_that_are_kept(
    new_job: Callable[..., Job],
) -> None:
    settings = {"checkpoint__keep_latest": "2"}
    job = new_job(train__max_steps="6", checkpoint__interval_steps="2", **settings)
    train(job, ALONE)
    flip_a_bit(job.checkpoint_address(6).path / shard_name(0))

    train(new_job(train__max_steps="7", checkpoint__interval_steps="10", **settings), ALONE)

    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (4, 6, 7)]


def test_damaged_later_checkpoints_do_not_push_out_the_intact_ones(new_job: Callable[..., Job]) -> None:
    job, shorter = new_job("a"), new_job("b", train__max_steps="10")
    train(job, ALONE)
    train(shorter, ALONE)
    for step in (15, 20):
        flip_a_bit(job.checkpoint_address(step).path / shard_name(0))
    for step in (5, 10):
        shorter.checkpoint_address(step).path.rename(job.checkpoint_address(step).path)

    discard_old(job.checkpoint_collection, job.recipe, 10, lambda step: True)

    assert completed_step(newest_checkpoint(job.checkpoint_collection)) == 10


def test_a_poisoned_step_is_skipped_and_counted_and_the_run_goes_on(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job()
    weights_before: dict[int, torch.Tensor] = {}
    work.poison(monkeypatch, 8)
    poisoned = Program.train_step

    def remember(program: Program, step: int, batches: list[MicroBatch], skipped_steps: int) -> object:
        weights_before[step] = torch.cat([bucket.weights_P for bucket in program.buckets])
        return poisoned(program, step, batches, skipped_steps)

    monkeypatch.setattr(Program, "train_step", remember)
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


def test_what_earlier_commands_left_of_checkpoints_is_removed(new_job: Callable[..., Job]) -> None:
    collection = new_job().checkpoint_collection
    for name in ("step-00000005.01234567.partial", "step-00000002.removed-01234567.partial", "step-00000001"):
        (collection / name).mkdir(parents=True)

    discard_left_over(collection)

    assert [path.name for path in collection.iterdir()] == ["step-00000001"]
