"""Loads the newest intact checkpoint into the workers, which verify the files that they read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest, LossSpikes, checkpoint_id
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError, UnreadableError
from services.common.program.llama import parameter_shapes
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateSlice
from services.common.program.step import Program
from services.trainer.branch import inherit_loss_spikes, open_parent
from services.trainer.checkpoints.lookup import (
    all_damaged,
    checkpoint_steps,
    open_checkpoint,
    require_of_run,
    verify_sizes,
)
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.node_staging import verify_on_node

logger = logging.getLogger(__name__)


class ResumePoint(NamedTuple):
    """The part of a checkpoint besides weights and moments; the defaults are those of a new run."""

    step: int = 0
    """Optimizer steps done."""
    skipped_steps: int = 0
    """Steps whose update was not applied because a gradient was not finite."""
    loss_spikes: LossSpikes | None = None


def resume(job: Job, program: Program, group: ProcessGroup) -> ResumePoint:
    """Load the newest checkpoint that all workers can verify. All workers call this.

    A branch without a checkpoint loads its parent's, and another new run keeps its initial state.

    Raises `ArtifactError` when all checkpoints, or the parent's, are damaged, or when the workers see different ones.
    """
    damages: list[str] = []
    for step in reversed(_agree_on_checkpoints(job, group)):
        with program.state.writing() as held:
            found = group.wait_for_work(partial(load_part, job, held, step))
        problems = _problems_of_all(found, group)
        if not problems:
            state = open_checkpoint(job.checkpoint_collection, step, verify_sizes).manifest.checkpoint
            logger.info("resuming after step=%d from %s", step, job.checkpoint_address(step).path)
            if damages and group.rank == 0:
                record_event(job, "fallback", to_step=step, damages=damages)
            return ResumePoint(step, state.skipped_steps, state.loss_spikes)
        logger.warning("skipping a damaged checkpoint: %s", problems[0])
        damages.append(f"{checkpoint_id(step)}: {problems[0]}")
    if damages:
        raise all_damaged(job.checkpoint_collection, damages)
    if job.recipe.train.branch:
        return _branch_off(job, program, group)
    logger.info("starting a new run")
    return ResumePoint()


def load_part(job: Job, held: dict[StateSlice, Tensor], step: int | None) -> str:
    """Load this worker's slices of the run's checkpoint of a step, or for None of its parent's, from verified files.

    Returns the problem of a damaged checkpoint, and an empty text otherwise.
    """
    try:
        _read(job, _open(job, step), held)
    except UnreadableError:
        raise
    except ArtifactError as error:
        return str(error)
    return ""


def _branch_off(job: Job, program: Program, group: ProcessGroup) -> ResumePoint:
    """Load the parent's checkpoint. All workers call this. Raises `ArtifactError` if it is damaged or another one."""
    with program.state.writing() as held:
        found = group.wait_for_work(partial(load_part, job, held, None))
    if problems := _problems_of_all(found, group):
        raise ArtifactError(
            f"{job.run}: cannot begin with its parent's checkpoint: {problems[0]}\nRestore it from a copy, or "
            f"set train.branch.step to another step of the parent."
        )
    parent = _open(job, None)
    state = parent.manifest.checkpoint
    logger.info("branching off after step=%d from %s", state.step, parent.path)
    return ResumePoint(state.step, state.skipped_steps, inherit_loss_spikes(parent, job.recipe, job.lineage))


def _open(job: Job, step: int | None) -> Artifact[CheckpointManifest]:
    """Open the run's checkpoint of a step, or for None that of its parent. Raises `ArtifactError` for another run's."""
    if step is not None:
        checkpoint = open_checkpoint(job.checkpoint_collection, step, verify_sizes)
        require_of_run(checkpoint, job.recipe, job.corpus)
        return checkpoint
    branch, expected = job.recipe.train.branch, job.lineage.parent
    assert branch
    assert expected
    parent = open_parent(job.root, branch)
    if parent.manifest.content_digest != expected.content_digest:
        raise ArtifactError(
            f"{parent.path}: has the digest {parent.manifest.content_digest[:12]}, but {job.run} branches from "
            f"{expected.content_digest[:12]}: the parent has written this step again. Start the command again: it "
            f"begins another run."
        )
    return parent


def _problems_of_all(found: str, group: ProcessGroup) -> list[str]:
    return [problem for worker in group.gather({"problem": found}) if (problem := worker["problem"])]


def load_weights(job: Job, program: Program, group: ProcessGroup, checkpoint: Artifact[CheckpointManifest]) -> None:
    """Load the weights of a checkpoint from verified files, and leave the moments as they are. All workers call this.

    Raises `ArtifactError` where a file is damaged or the checkpoint is not of the program's model.
    """
    with program.state.writing() as held:
        weights = {piece: tensor for piece, tensor in held.items() if piece.kind == "weight"}
        group.wait_for_work(partial(_read, job, checkpoint, weights))


def _read(job: Job, checkpoint: Artifact[CheckpointManifest], held: Mapping[StateSlice, Tensor]) -> None:
    reader = ShardReader(checkpoint, parameter_shapes(job.recipe.model))
    files = reader.files_of(held)
    logger.info("reading %d of %d shards of %s", len(files), len(checkpoint.manifest.files), checkpoint.path)
    verify_on_node(job, checkpoint, files)
    reader.read(held)


def _agree_on_checkpoints(job: Job, group: ProcessGroup) -> list[int]:
    """Return the steps of the checkpoints, ascending. Raises `ArtifactError` when the workers see different ones."""
    seen = group.gather({"steps": checkpoint_steps(job.checkpoint_collection)})
    for rank, theirs in enumerate(seen):
        if theirs != seen[0]:
            one, other = (max(worker["steps"], default=0) for worker in (seen[0], theirs))
            raise ArtifactError(
                f"{job.checkpoint_collection}: rank 0 sees {len(seen[0]['steps'])} checkpoints, the newest after step "
                f"{one}, but rank {rank} sees {len(theirs['steps'])}, the newest after step {other}: the folder is not "
                f"the same on their nodes. Compare with `python -m services.common.artifacts list` on each node."
            )
    return list(seen[0]["steps"])
