"""Counts the files that a worker opens, and the bytes that rank 0 sends it, when a run resumes.

Neither grows with the number of workers. The tests use a checkpoint of 1,024 sparse shards.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from services.common.artifacts.checkpoint import INDEX_FILE, CheckpointManifest, CheckpointPayload, shard_name
from services.common.artifacts.manifest import MANIFEST, FileEntry
from services.common.artifacts.store import Artifact, Draft, Workspace, open_artifact, publish_once
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh, make_mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateKind, StateSlice
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.common.testing.file_opens import noticing_opens
from services.trainer.checkpoints.index import of_all_kinds, write_index
from services.trainer.checkpoints.loader import find_checkpoint, load_part
from services.trainer.checkpoints.lookup import FoundCheckpoint, describe_checkpoint
from services.trainer.checkpoints.shards import write_shard
from services.trainer.job import Job, tokens_after

STEP, WORKERS, WORKER = 4, 1_024, 517
SPARSE_BYTES = 2**30
LAYOUT = {
    "parallel__tensor_parallel_size": "2",
    "parallel__zero_stage": "1",
    "batch__global_batch_size": "1024",
}
DATA_PARALLEL_SIZE = WORKERS // 2
MAX_OPENS_OF_A_FILE = 3
"""A file is opened once to verify its bytes, and by safetensors once for its header and once for torch to map."""
NEAR = range(WORKER - 16, WORKER + 17)
"""Ranks whose shards have content."""

Held = dict[StateSlice, torch.Tensor]


@dataclass(frozen=True)
class Sparse:
    """A job whose only checkpoint was written by WORKERS workers, and the slices of each worker."""

    job: Job
    mesh: Mesh
    checkpoint: FoundCheckpoint
    opened_by_rank_0: list[Path]
    new_job: Callable[..., Job]


def find_slices(recipe: Recipe) -> dict[str, np.ndarray]:
    workers = recipe.parallel.num_workers
    group = ProcessGroup.fake(workers)
    backend = TorchNative(make_mesh(recipe, 0, workers), 1, recipe.train.reduction)
    owners = Program(recipe, backend, draws_weights=False).state.find_owners()
    group.leave()
    return owners


def slices_of(rank: int, owners: dict[str, np.ndarray]) -> Held:
    """Return what a worker holds, each element -1 or, in a mean of squares, 1."""
    held: Held = {}
    for name, rows in owners.items():
        for top, bottom, left, right, start, stop, _ in rows[rows[:, -1] == rank].tolist():
            box = ((left, right),) if "norm" in name else ((top, bottom), (left, right))
            for kind in get_args(StateKind):
                piece = StateSlice(kind, name, box, start, stop)
                held[piece] = torch.full((len(piece),), 1.0 if kind == "exp_avg_sq" else -1.0)
    return held


@pytest.fixture(scope="module")
def sparse(new_shared_job: Callable[..., Job]) -> Sparse:
    job = new_shared_job("sparse", parallel__data_parallel_size=str(DATA_PARALLEL_SIZE), **LAYOUT)
    owners = find_slices(job.recipe)
    payload = CheckpointPayload(
        step=STEP,
        tokens=tokens_after(job.recipe, None, STEP, 0),
        skipped_steps=0,
        data_parallel_size=DATA_PARALLEL_SIZE,
        tensor_parallel_size=2,
        zero_stage=1,
        shards={},
        program_fingerprint=job.program_fingerprint,
        waivers=(),
    ).with_shards(job.run, {shard_name(rank): rank for rank in range(WORKERS)})

    def build(workspace: Workspace) -> Draft:
        files = [write_index(workspace.files, payload.origin(job.run, 0), of_all_kinds(owners))]
        for rank in range(WORKERS):
            file = shard_name(rank)
            if rank in NEAR:
                held = slices_of(rank, owners)
                files.append(write_shard(workspace.files, file, payload.shards[file], held))
            else:
                (workspace.files / file).touch()
                os.truncate(workspace.files / file, SPARSE_BYTES)
                files.append(FileEntry(path=file, bytes=SPARSE_BYTES, xxh3_128="0" * 32, sha256="0" * 64))
        return Draft(payload, (job.corpus.link,), tuple(files))

    address = job.checkpoint_address(STEP)
    publish_once(address, CheckpointManifest, "trainer", job.recipe, build)
    with noticing_opens(address.path) as opens:
        found, _ = find_checkpoint(job, make_mesh(job.recipe, 0, WORKERS), STEP)
    assert found.checkpoint
    return Sparse(job, make_mesh(job.recipe, WORKER, WORKERS), found.checkpoint, opens.paths, new_shared_job)


def load(sparse: Sparse, job: Job, mesh: Mesh, held: Held) -> Counter[str]:
    """Load a worker's part into tensors of zeros, and return how often it opened which file."""
    target = {piece: torch.zeros_like(tensor) for piece, tensor in held.items()}
    _, own_shards = find_checkpoint(job, mesh, STEP)
    with noticing_opens(sparse.checkpoint.path) as opens:
        problem = load_part(replace(job, attempt=f"rank-{mesh.rank}"), sparse.checkpoint, own_shards[mesh.rank], target)
    assert problem == ""
    assert all(torch.equal(target[piece], tensor) for piece, tensor in held.items())
    return Counter(path.name for path in opens.paths)


def test_a_worker_of_the_same_layout_is_told_its_own_shard_alone(sparse: Sparse) -> None:
    manifest = open_artifact(sparse.checkpoint.path, CheckpointManifest).manifest
    told_bytes = []
    for workers in (16, 64, WORKERS):
        state = manifest.checkpoint.model_copy(update={"data_parallel_size": workers // 2})
        state = state.with_shards(manifest.name, {shard_name(rank): rank for rank in range(workers)})
        files = tuple(entry for entry in manifest.files if entry.path in {INDEX_FILE, *state.shards})
        written = Artifact(sparse.checkpoint.path, manifest.model_copy(update={"checkpoint": state, "files": files}))

        told, own_shards = describe_checkpoint(written, sparse.job.recipe, Mesh(0, workers // 2, 2))

        assert [own.entry.path for own in own_shards if own] == [*state.shards]
        told_bytes.append(len(pickle.dumps((told, own_shards[-1]))))
    assert max(told_bytes) - min(told_bytes) < 20
    assert max(told_bytes) < 6_000


def test_rank_0_opens_the_manifest_and_a_worker_of_the_same_layout_its_own_shard(sparse: Sparse) -> None:
    assert [path.name for path in sparse.opened_by_rank_0] == [MANIFEST]
    opened = load(sparse, sparse.job, sparse.mesh, slices_of(WORKER, find_slices(sparse.job.recipe)))
    assert set(opened) == {shard_name(WORKER)}
    assert max(opened.values()) <= MAX_OPENS_OF_A_FILE


def test_a_worker_of_another_layout_opens_the_index_and_the_shards_that_have_its_part(sparse: Sparse) -> None:
    fewer = sparse.new_job("sparse", parallel__data_parallel_size=str(DATA_PARALLEL_SIZE // 2), **LAYOUT)
    rank = WORKER // 2 + 1 - WORKER // 2 % 2
    mesh = make_mesh(fewer.recipe, rank, WORKERS // 2)

    opened = load(sparse, fewer, mesh, slices_of(rank, find_slices(fewer.recipe)))

    assert opened.pop(MANIFEST) == 1
    assert max(opened.values()) <= MAX_OPENS_OF_A_FILE
    assert set(opened) <= {INDEX_FILE, *(shard_name(each) for each in NEAR)}
    assert 3 <= len(opened) <= 9
