"""A worker of a lost attempt, frozen or disconnected, commits nothing when it wakes up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch

from services.common.artifacts.checkpoint import LossSpikes
from services.common.artifacts.lease import hold_lease
from services.common.artifacts.store import is_work
from services.common.errors import TryAgain
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.trainer.checkpoints.lookup import newest_checkpoint
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.job import Job, completed_step
from services.trainer.loop import train
from services.trainer.tests.builders import make_program
from services.trainer.tests.runs import checkpoints

ALONE = WorkerEnvironment(rank=0, world_size=1)
LEFTOVERS = (
    "step-00000005.partial",
    "step-00000005.01234567.partial",
    "step-00000003.01234567.partial",
    "step-00000002.removed-01234567.partial",
)


def test_a_worker_of_an_earlier_attempt_commits_nothing(tmp_path: Path, new_job: Callable[..., Job]) -> None:
    with hold_lease(tmp_path / "command.lock") as held:
        lost = replace(new_job(train__max_steps="5"), lease=held.lease)
        held.renew()

        with pytest.raises(TryAgain, match="lost to another writer"):
            train(lost, ALONE)

        assert checkpoints(lost.root) == {}


def write_alone(job: Job, program: Program) -> CheckpointWriter:
    writer = CheckpointWriter(job, program.backend.mesh, ProcessGroup(rank=0, world_size=1))
    writer.save(program.state, 5, 0, started=0.0, loss_spikes=LossSpikes())
    return writer


def test_a_worker_that_wakes_up_while_it_writes_ends_and_damages_nothing(
    tmp_path: Path, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt has written the same checkpoint and removed the unfinished one."""
    serialize, calls = safetensors.torch.save, itertools.count()
    with hold_lease(tmp_path / "command.lock") as held:
        lost = replace(new_job(), lease=held.lease)
        program = make_program(lost.recipe)

        def sleep_before(*arguments: object, **options: object) -> bytes:
            if next(calls) == 0:
                successor = write_alone(replace(lost, lease=held.renew()), program)
                successor.wait()
            return serialize(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(safetensors.torch, "save", sleep_before)
        writer = write_alone(lost, program)
        with pytest.raises(TryAgain, match="lost to another writer"):
            writer.wait()

    assert completed_step(newest_checkpoint(lost.checkpoint_collection)) == 5
    assert [path.name for path in lost.checkpoint_collection.iterdir()] == ["step-00000005"]


def test_what_earlier_attempts_left_of_checkpoints_is_removed_by_the_one_that_writes_the_next(
    new_job: Callable[..., Job],
) -> None:
    job = new_job(train__max_steps="5")
    for name in LEFTOVERS:
        (job.checkpoint_collection / name).mkdir(parents=True)

    train(job, ALONE)

    assert not [path for path in job.checkpoint_collection.iterdir() if is_work(path.name)]
