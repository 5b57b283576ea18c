"""Loads the newest intact checkpoint into the workers, which verify the files that they read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from services.trainer.checkpoints.retention import discard_newer
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
    loss_spikes: LossSpikes = LossSpikes()
    recipe: dict[str, Any] | None = None
    """Recipe with which the checkpoint was made; None if the program keeps its initial state."""


def resume(job: Job, program: Program, group: ProcessGroup) -> ResumePoint:
    """Load the newest checkpoint that all workers can verify. All workers call this.

    A branch without a checkpoint loads its parent's, and another new run keeps its initial state.

    Raises `ArtifactError` when all checkpoints, or the parent's, are damaged, or when the workers see different ones.
    """
    steps = _agree_on_checkpoints(job, group)
    point = _load_first(job, program, group, [*reversed(steps)] or [None])
    if steps:
        logger.info("resuming after step=%d from %s", point.step, job.checkpoint_address(point.step).path)
    elif not job.recipe.train.branch:
        logger.info("starting a new run")
    return point


def roll_back(job: Job, program: Program, group: ProcessGroup, wanted_step: int) -> ResumePoint:
    """Load the newest checkpoint of at most `wanted_step` steps, and remove all later ones. All workers call this.

    If there is none, the run goes back to its initial state where that takes no longer than from one checkpoint to the
    next, and otherwise to its oldest checkpoint. A branch's initial state is its parent's checkpoint. Random weights
    are left to the caller to make: the returned point then has no recipe. Raises `ArtifactError` when all of these
    checkpoints are damaged.
    """
    steps, recipe = _agree_on_checkpoints(job, group), job.recipe
    older = [step for step in reversed(steps) if step <= wanted_step]
    newer = [step for step in steps if step > wanted_step]
    has_initial_state = recipe.train.initial_weights is None
    begin = recipe.train.branch.step if recipe.train.branch else 0
    is_near = wanted_step - begin < recipe.checkpoint.interval_steps or not steps
    initial = [None] if has_initial_state and is_near else []
    point = _load_first(job, program, group, [*older, *initial, *newer])

    def discard_abandoned() -> None:
        if group.rank == 0:
            assert job.lease is not None
            discard_newer(job.checkpoint_collection, point.step, job.lease)

    group.wait_for_work(discard_abandoned)
    return point


def _load_first(job: Job, program: Program, group: ProcessGroup, candidates: Sequence[int | None]) -> ResumePoint:
    """Load the first intact one of the checkpoints of these steps, where None stands for the initial state.

    Raises `ArtifactError` if all are damaged.
    """
    damages: list[str] = []
    for step in candidates:
        if step is None:
            if not job.recipe.train.branch:
                return ResumePoint()
            try:
                return _branch_off(job, program, group)
            except ArtifactError as error:  # on all workers: they have exchanged their problems
                if candidates[-1] is None:
                    raise
                logger.warning("the parent's checkpoint cannot be loaded: %s", error)
                damages.append(str(error))
                continue
        with program.state.writing() as held:
            found = group.wait_for_work(partial(load_part, job, held, step))
        problems = _problems_of_all(found, group)
        if not problems:
            manifest = open_checkpoint(job.checkpoint_collection, step, verify_sizes).manifest
            state = manifest.checkpoint
            if damages and group.rank == 0:
                record_event(job, "fallback", to_step=step, damages=damages)
            return ResumePoint(step, state.skipped_steps, state.loss_spikes, manifest.recipe)
        logger.warning("skipping a damaged checkpoint: %s", problems[0])
        damages.append(f"{checkpoint_id(step)}: {problems[0]}")
    raise all_damaged(job.checkpoint_collection, damages)


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
    inherited = inherit_loss_spikes(parent, job.recipe, job.lineage) or LossSpikes()
    return ResumePoint(state.step, state.skipped_steps, inherited, parent.manifest.recipe)


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
