"""An index that does not fit its checkpoint's shards is damage, which no worker reads past."""

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

from services.common.artifacts.checkpoint import INDEX_FILE
from services.common.errors import ArtifactError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.testing.manifests import forge, in_all_of_state, reseal
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.lookup import Verify, open_checkpoint, verify_checkpoint, verify_state
from services.trainer.checkpoints.shards import ORIGIN
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.tests.runs import flip_a_bit, problem_of

NORM = "weight/model.norm.weight"
Tables = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(new_shared_job: Callable[..., Job]) -> Job:
    """A run of one worker with a checkpoint after its only step."""
    job = new_shared_job(train__max_steps="1", checkpoint__interval_steps="1")
    train(job, WorkerEnvironment(rank=0, world_size=1))
    return job


@pytest.fixture
def job(trained: Job, tmp_path: Path) -> Job:
    shutil.copytree(trained.root, tmp_path / "copy")
    return replace(trained, root=tmp_path / "copy", attempt=tmp_path.name)


def problem_of_one_of_two(job: Job) -> str:
    """Return why a worker of a layout with two workers cannot load the checkpoint; empty if it can."""
    group = ProcessGroup.fake(2)
    try:
        return problem_of(job, 1, Mesh(0, data_parallel_size=2))
    finally:
        group.leave()


def rewrite_index(folder: Path, change: Callable[[Tables], object], **origin: int) -> None:
    """Write the index again, and a manifest that vouches for it."""
    path = folder / INDEX_FILE
    with safetensors.safe_open(path, "pt") as file:
        written = json.loads(file.metadata()[ORIGIN])
    tables = {key: table.clone() for key, table in safetensors.torch.load_file(path).items()}
    change(tables)
    path.write_bytes(safetensors.torch.save(tables, {ORIGIN: json.dumps(written | origin)}))
    forge(folder)


def find_problem(job: Job, verify: Verify) -> str:
    """Return why the checkpoint is refused; empty if it is intact."""
    try:
        open_checkpoint(job.checkpoint_collection, 1, verify)
    except ArtifactError as error:
        return str(error)
    return ""


def test_a_worker_of_another_layout_loads_by_the_index_and_misses_what_it_does_not_have(job: Job) -> None:
    assert problem_of_one_of_two(job) == ""
    assert find_problem(job, verify_state(job.recipe, job.corpus)) == ""

    rewrite_index(job.checkpoint_address(1).path, lambda tables: tables.pop(NORM))
    assert NORM in problem_of_one_of_two(replace(job, start_number=1))
    assert problem_of(job, 1) == ""  # a worker of the same layout does not read the index


def test_an_index_of_another_step_and_a_damaged_one_are_refused(job: Job) -> None:
    folder = job.checkpoint_address(1).path
    rewrite_index(folder, lambda tables: None, step=2)
    assert INDEX_FILE in problem_of_one_of_two(job)

    flip_a_bit(folder / INDEX_FILE)
    assert INDEX_FILE in find_problem(job, verify_checkpoint)
    assert INDEX_FILE in problem_of_one_of_two(replace(job, start_number=1))


def test_a_worker_of_another_layout_refuses_a_manifest_that_rank_0_has_not_read(job: Job) -> None:
    found, _ = find_checkpoint(job, Mesh(0, data_parallel_size=2), 1)
    assert found.checkpoint
    reseal(found.checkpoint.path, in_all_of_state(tokens=found.checkpoint.state.tokens + 1))

    assert "another manifest" in load_part(job, found.checkpoint, None, {})
