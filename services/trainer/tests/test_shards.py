"""The files of a checkpoint make up one state, each element once, of one run, step and layout; or nothing is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from services.common.artifacts.checkpoint import shard_name
from services.common.launch.launcher import WorkerEnvironment
from services.common.testing.manifests import forge, reseal
from services.trainer.checkpoints.shards import ORIGIN
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.tests.runs import checkpoints, flip_a_bit, problem_of, state_hash, vouch_for_files

ALONE = WorkerEnvironment(rank=0, world_size=1)
FILES = (shard_name(0), shard_name(1))
NORM = "weight/model.norm.weight[0:16]"
MOMENT = "exp_avg/model.embed_tokens.weight[0:300,0:16]"
SECOND_MOMENT = MOMENT.replace("exp_avg/", "exp_avg_sq/")

Tensors = dict[str, torch.Tensor]
Files = tuple[Tensors, Tensors]


@pytest.fixture(scope="module")
def two_steps(new_shared_job: Callable[..., Job]) -> Job:
    """A run of one worker with checkpoints after both of its steps, the second one in two files, as an import's is."""
    job = new_shared_job("published", train__max_steps="2", checkpoint__interval_steps="1")
    train(job, ALONE)
    folder = job.checkpoint_address(2).path
    before = state_hash(folder)
    rewrite(folder, lambda files: move(files, list(files[0])[len(files[0]) // 2 :]))
    assert state_hash(folder) == before
    return job


@pytest.fixture
def job(two_steps: Job, tmp_path: Path) -> Job:
    """A copy of the run, to be changed."""
    shutil.copytree(two_steps.root, tmp_path / "copy")
    return replace(two_steps, root=tmp_path / "copy")


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    with safetensors.safe_open(path, "pt") as file:
        # Copies: the file that they are mapped from is written again.
        return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118 - no mapping


def rewrite(folder: Path, change: Callable[[Files], object]) -> None:
    """Write both files again, and a manifest that vouches for them."""
    tensors, metadata = read(folder / FILES[0])
    more = read(folder / FILES[1])[0] if (folder / FILES[1]).exists() else {}
    files = (tensors, more)
    change(files)
    for name, content in zip(FILES, files, strict=True):
        (folder / name).write_bytes(safetensors.torch.save(content, metadata))

    origins = dict.fromkeys(FILES, json.loads(metadata[ORIGIN]))
    vouch_for_files(folder, lambda fields: fields["checkpoint"].update(shards=origins))


def move(files: Files, keys: list[str]) -> None:
    files[1].update({key: files[0].pop(key) for key in keys})


def holder(files: Files, key: str) -> Tensors:
    return next(file for file in files if key in file)


def set_last(key: str, value: float) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        holder(files, key)[key].view(-1)[-1] = value

    return change


def leave_out(files: Files) -> None:
    del holder(files, MOMENT)[MOMENT]


def write_text(folder: Path) -> None:
    (folder / FILES[1]).write_bytes(b"text")
    forge(folder)


def take_from_step_1(folder: Path) -> None:
    shutil.copy(folder.with_name("step-00000001") / FILES[0], folder / FILES[0])
    forge(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda folder: flip_a_bit(folder / FILES[1]), FILES[1]),
    "a missing file": (lambda folder: (folder / FILES[1]).unlink(), FILES[1]),
    "no safetensors file": (write_text, FILES[1]),
    "a shard of another step": (take_from_step_1, FILES[0]),
    "a tensor that no shard has": (lambda folder: rewrite(folder, leave_out), MOMENT),
    "a negative mean of squares": (lambda folder: rewrite(folder, set_last(SECOND_MOMENT, -1e-3)), SECOND_MOMENT),
    "a NaN": (lambda folder: rewrite(folder, set_last(NORM, float("nan"))), NORM),
    "another run's manifest": (lambda folder: reseal(folder, lambda fields: fields.update(name="x")), "x"),
    "another recipe": (lambda folder: reseal(folder, lambda fields: fields.update(identity_key="0" * 64)), "0000"),
    "another corpus": (
        lambda folder: reseal(folder, lambda fields: fields["inputs"][0].update(content_digest="0" * 64)),
        "0000",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_run_continues_from_the_one_before(job: Job, damage: str) -> None:
    folder, (change, place) = job.checkpoint_address(2).path, DAMAGES[damage]
    expected = state_hash(folder)
    change(folder)

    assert place in problem_of(job, 2)
    train(job, ALONE)

    assert state_hash(checkpoints(job.root)["step-00000002"]) == expected
