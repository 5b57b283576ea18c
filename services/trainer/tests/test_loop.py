"""Training in this process: resume, damage, poisoned gradients, retention."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.artifacts.checkpoint import checkpoint_id, shard_name
from services.common.artifacts.manifest import MANIFEST
from services.common.errors import ArtifactError, DeviceError, TryAgain
from services.common.process.shutdown import DRAIN_TIMEOUT_VARIABLE, StopReason
from services.common.program.process_group import ProcessGroup
from services.trainer import loop
from services.trainer.checkpoints.loader import resume
from services.trainer.checkpoints.retention import discard_old
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.job import Job
from services.trainer.metrics.events import EventTail, count_events, warnings_of
from services.trainer.metrics.records import read_metrics
from services.trainer.supervision.stop import STOP_FILE
from services.trainer.tests.builders import NewJob, make_program, make_recipe, train_here, train_new
from services.trainer.tests.runs import checkpoints, flip_a_bit, problem_of, state_hash


@pytest.fixture(scope="module")
def ten_steps(new_shared_job: NewJob) -> Job:
    """A run with checkpoints after steps 5 and 10."""
    return train_new(new_shared_job, train__max_steps="10")


def copy_of(job: Job, folder: Path) -> Job:
    shutil.copytree(job.root, folder / "copy")
    return replace(job, root=folder / "copy", attempt=folder.name)


def values(job: Job, name: str) -> list[Any]:
    """Return a number of each recorded step."""
    return [record[name] for record in read_metrics(job.run_folder)]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_run_made_longer_continues_as_if_it_had_been_long_from_the_start(
    new_job: NewJob, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"train__dtype": dtype, "train__param_dtype": dtype}
    straight = train_new(new_job, "straight", train__max_steps="8", **types)
    train_new(new_job, "split", train__max_steps="3", **types)
    split = new_job("split", train__max_steps="8", **types)
    monkeypatch.setattr("services.common.program.step.draw_weights", None)  # a run that resumes draws none
    train_here(split)
    assert split.run == straight.run
    assert values(split, "loss") == values(straight, "loss")
    assert state_hash(split.checkpoint_address(8).path) == state_hash(straight.checkpoint_address(8).path)


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over(ten_steps: Job, tmp_path: Path) -> None:
    job = copy_of(ten_steps, tmp_path)
    assert problem_of(job, 10) == ""
    for checkpoint in checkpoints(job.root).values():
        flip_a_bit(checkpoint / shard_name(0))

    assert problem_of(job, 10) == ""  # as this command has verified it
    assert shard_name(0) in problem_of(replace(job, start_number=1), 10)  # but not once workers were lost
    with pytest.raises(ArtifactError, match=r"step-00000010(?s:.*)step-00000005"):
        train_here(replace(job, attempt="next"))


def test_a_checkpoint_that_a_node_does_not_see_is_not_passed_over(
    ten_steps: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is intact: from an older one the run would do again what was done, and remove it in the end."""
    newest, exists = ten_steps.checkpoint_address(10).path, Path.exists
    monkeypatch.setattr(Path, "exists", lambda path, **options: path != newest and exists(path, **options))

    with pytest.raises(ArtifactError, match=newest.name):
        resume(ten_steps, make_program(ten_steps.recipe), ProcessGroup(0, 1), [5, 10])


@pytest.mark.parametrize(
    ("settings", "newest", "damaged", "kept"),
    [
        ({"checkpoint__keep_latest": "2"}, 12, (), (10, 12)),
        ({"checkpoint__keep_latest": "2", "checkpoint__keep_interval_steps": "4"}, 12, (), (4, 8, 10, 12)),
        ({"checkpoint__keep_latest": "2"}, 12, (8, 10), (6, 8, 10, 12)),  # damaged ones do not count
        ({"checkpoint__keep_latest": "2"}, 8, (), (6, 8, 10, 12)),  # later ones are damaged: the run would have resumed
    ],
)
def test_the_newest_intact_checkpoints_are_kept_and_those_at_the_long_interval(
    tmp_path: Path, settings: dict[str, str], newest: int, damaged: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    for step in range(2, 13, 2):
        (tmp_path / checkpoint_id(step)).mkdir()
        (tmp_path / checkpoint_id(step) / MANIFEST).touch()
    discard_old(tmp_path, make_recipe(tmp_path, **settings), newest, lambda step: step not in damaged)
    assert checkpoint_steps(tmp_path) == list(kept)


def test_a_checkpoint_that_the_notice_of_a_stop_would_not_hold_is_said(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DRAIN_TIMEOUT_VARIABLE, "0.000001")
    job = train_new(new_job, train__max_steps="4", checkpoint__interval_steps="2")
    assert len(warnings_of(EventTail(job).read())) == 1
    assert count_events(job.run_folder) == {"short_notice": 1}


def test_a_checkpoint_that_was_damaged_at_the_start_does_not_count_among_those_that_are_kept(new_job: NewJob) -> None:
    settings = {"checkpoint__keep_latest": "2"}
    job = train_new(new_job, train__max_steps="6", checkpoint__interval_steps="2", **settings)
    flip_a_bit(job.checkpoint_address(6).path / shard_name(0))

    train_new(new_job, train__max_steps="7", checkpoint__interval_steps="10", **settings)

    assert list(checkpoints(job.root)) == [f"step-{step:08d}" for step in (4, 6, 7)]


@pytest.mark.parametrize("reason", [StopReason.STOP_FILE, StopReason.TIME_LIMIT], ids=str)
def test_a_stop_ends_the_run_with_a_checkpoint_and_is_used_up(new_job: NewJob, reason: StopReason) -> None:
    job = new_job(train__max_steps="2", train__time_limit_seconds="60.0")
    if reason is StopReason.STOP_FILE:
        (job.run_folder / STOP_FILE).touch()
    late = job.started_at - timedelta(seconds=61 if reason is StopReason.TIME_LIMIT else 0)
    with pytest.raises(TryAgain, match=f"{reason} after step 1"):
        train_here(replace(job, started_at=late))
    assert list(checkpoints(job.root)) == ["step-00000001"]
    train_here(job)
    assert "step-00000002" in checkpoints(job.root)


def test_with_a_checkpoint_after_each_step_no_commit_waits_for_a_write(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_written, write, commit = list[bool](), CheckpointWriter._write, CheckpointWriter._commit

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.02)  # most of a step
        return write(*arguments)

    def note(writer: CheckpointWriter) -> None:
        assert writer._writing
        are_written.append(writer._writing.done())
        commit(writer)

    monkeypatch.setattr(CheckpointWriter, "_write", write_slowly)
    monkeypatch.setattr(CheckpointWriter, "_commit", note)
    job = train_new(new_job, train__max_steps="8", checkpoint__interval_steps="1", checkpoint__keep_latest="8")

    assert list(checkpoints(job.root)) == [f"step-{step:08}" for step in range(1, 9)]
    assert are_written == [True] * 8
    stalled = [each["step"] for each in read_metrics(job.run_folder) if "checkpoint_stall_seconds" in each]
    assert stalled == list(range(1, 9))


@pytest.mark.parametrize("requires_warm", [False, True])
def test_kernels_that_the_cache_lacks_are_a_miss_although_its_graphs_are_found(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch, requires_warm: bool
) -> None:
    cache: Any = SimpleNamespace(path="cache")
    job = replace(new_job(train__max_steps="2", compile__require_warm=str(requires_warm).lower()), cache=cache)
    monkeypatch.setattr(loop, "prepare_node", lambda job: None)
    monkeypatch.setattr(loop, "new_cache_files", lambda job: 3)
    with pytest.raises(DeviceError, match="cache: 3") if requires_warm else nullcontext():
        train_here(job)

    assert count_events(job.run_folder) == {"cache_miss": 1}
