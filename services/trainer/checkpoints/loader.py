"""Loads the newest intact checkpoint into the workers, which verify the files that they read.

Rank 0 alone lists the checkpoints, reads a manifest and compares the sizes of the files. It tells each worker what it
found, and of the files the worker's own shard alone: nothing grows with the square of the number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from services.common.artifacts.checkpoint import (
    INDEX_FILE,
    CheckpointManifest,
    ImportedModel,
    LossSpikes,
    checkpoint_id,
)
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError, UnreadableError
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateSlice
from services.common.program.step import Program
from services.common.program.transformer import parameter_shapes
from services.trainer.checkpoints.index import read_index
from services.trainer.checkpoints.lookup import (
    FoundCheckpoint,
    OwnShard,
    all_damaged,
    describe_checkpoint,
    open_checkpoint,
    verify_state,
)
from services.trainer.checkpoints.retention import discard_newer
from services.trainer.checkpoints.shards import Place, Places, SliceReader, open_tensors, read_header
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.job import ALLOW_CHANGED_PROGRAM, Job
from services.trainer.metrics.events import record_event
from services.trainer.runs.branch import inherit_loss_spikes, open_parent
from services.trainer.workers.node_staging import verify_on_node

logger = logging.getLogger(__name__)


class ResumePoint(NamedTuple):
    """The part of a checkpoint besides weights and moments; the defaults are those of a new run."""

    step: int = 0
    """Optimizer steps done."""
    skipped_steps: int = 0
    """Steps whose update was not applied because a gradient was not finite."""
    loss_spikes: LossSpikes = LossSpikes()
    is_loaded: bool = False
    """Whether the state was loaded; False if the program keeps its initial state."""
    imported: ImportedModel | None = None
    """Configuration of the model whose weights the run began with; None if they were random."""
    waivers: tuple[str, ...] = ()
    """Flags with which the state was made, and that with which another program continues it."""
    damaged_steps: tuple[int, ...] = ()
    """Steps of the checkpoints that were found damaged before this one was found intact."""


def list_checkpoints(job: Job, group: ProcessGroup) -> list[int]:
    """Return the steps of the run's checkpoints, ascending, as rank 0 sees them. All workers call this."""
    return group.tell(lambda: checkpoint_steps(job.checkpoint_collection))


def resume(job: Job, program: Program, group: ProcessGroup, steps: Sequence[int]) -> ResumePoint:
    """Load the newest of the run's checkpoints, after these steps, that all workers can verify. All workers call this.

    A branch without a checkpoint loads its parent's, and another new run keeps its initial state.

    Raises `ArtifactError` when all checkpoints, or the parent's, are damaged, or when a worker does not see one.
    """
    point = _load_first(job, program, group, [*reversed(steps)] or [None])
    if steps:
        logger.info("resuming after step=%d from %s", point.step, job.checkpoint_address(point.step).path)
    elif not job.recipe.train.branch:
        logger.info("starting a new run")
    return point


def roll_back(job: Job, program: Program, group: ProcessGroup, wanted_step: int) -> ResumePoint:
    """Load the newest checkpoint of at most `wanted_step` steps, and remove all later ones. All workers call this.

    If there is none, the run goes back to its initial state where that takes no longer than from one checkpoint to the
    next, and otherwise to its oldest checkpoint. Where the initial state is random weights, nothing is loaded, and the
    caller draws them. Raises `ArtifactError` when all of these checkpoints are damaged.
    """
    steps, recipe = list_checkpoints(job, group), job.recipe
    older = [step for step in reversed(steps) if step <= wanted_step]
    newer = [step for step in steps if step > wanted_step]
    first_step = recipe.train.branch.step if recipe.train.branch else 0
    is_near = wanted_step - first_step < recipe.checkpoint.interval_steps or not steps
    initial = [None] if recipe.train.initial_weights is None and is_near else []
    point = _load_first(job, program, group, [*older, *initial, *newer])
    group.tell(lambda: discard_newer(job.checkpoint_collection, point.step))
    return point


class CheckpointFinding(NamedTuple):
    """What a worker finds out about a checkpoint and tells the others."""

    checkpoint: FoundCheckpoint | None
    """The checkpoint; None if it is damaged."""
    problem: str
    """Description of the damage; otherwise empty."""
    loss_spikes: LossSpikes = LossSpikes()
    """State with which the detector of loss spikes goes on."""


def _load_first(job: Job, program: Program, group: ProcessGroup, candidates: Sequence[int | None]) -> ResumePoint:
    """Load the first intact one of the checkpoints of these steps, where None stands for the initial state.

    Raises `ArtifactError` if all are damaged.
    """
    damages: list[str] = []
    damaged_steps: list[int] = []
    for step in candidates:
        if step is None and not job.recipe.train.branch:
            return ResumePoint(damaged_steps=tuple(damaged_steps))
        found = _load(job, program, group, step)
        if found.checkpoint:
            header = found.checkpoint.header
            state = header.checkpoint
            is_others = step is not None and state.program_fingerprint != job.program_fingerprint
            if step is None:
                logger.info("branching off after step=%d from %s", state.step, found.checkpoint.path)
            elif damages and group.rank == 0:
                record_event(job, "fallback", to_step=step, damages=damages)
            return ResumePoint(
                step=state.step,
                skipped_steps=state.skipped_steps,
                loss_spikes=found.loss_spikes,
                is_loaded=True,
                imported=state.imported,
                waivers=(*state.waivers, *[ALLOW_CHANGED_PROGRAM] * is_others),
                damaged_steps=tuple(damaged_steps),
            )
        if step is None:
            damages.append(
                f"{job.run}: cannot start with its parent's checkpoint: {found.problem}\nRestore it from a copy, or "
                f"set train.branch.step to another step of the parent."
            )
        else:
            damages.append(f"{checkpoint_id(step)}: {found.problem}")
            damaged_steps.append(step)
        logger.warning("skipping a damaged checkpoint: %s", damages[-1])
    if candidates[-1] is None:
        raise ArtifactError(damages[-1])
    raise all_damaged(job.checkpoint_collection, damages)


def _load(job: Job, program: Program, group: ProcessGroup, step: int | None) -> CheckpointFinding:
    """Load the run's checkpoint of a step, or for None its parent's. All workers call this.

    Returns rank 0's finding, or that of the first worker that finds the checkpoint damaged.
    """
    told, own_shards = group.tell(partial(find_checkpoint, job, program.backend.mesh, step))
    if told.checkpoint is None:
        return told
    _require_seen(told.checkpoint, group)
    with program.state.writing() as held:
        problem = group.wait_for_work(partial(load_part, job, told.checkpoint, own_shards[group.rank], held))
    if not group.maximum(bool(problem)):
        return told
    return CheckpointFinding(None, next(filter(None, group.gather(problem))))


def find_checkpoint(job: Job, mesh: Mesh, step: int | None) -> tuple[CheckpointFinding, list[OwnShard | None]]:
    """Describe the run's checkpoint of a step, or for None its parent's: from its manifest, and the files' sizes.

    Also return each rank's own shard, as `describe_checkpoint` does.
    """
    try:
        if step is None:
            checkpoint = _open_parent(job)
            spikes = inherit_loss_spikes(checkpoint, job.recipe, job.corpus, job.lineage) or LossSpikes()
        else:
            checkpoint = open_checkpoint(job.checkpoint_collection, step, verify_state(job.recipe, job.corpus, "size"))
            spikes = checkpoint.manifest.checkpoint.loss_spikes
    except UnreadableError:
        raise
    except ArtifactError as error:
        return CheckpointFinding(None, str(error)), [None] * mesh.world_size
    if checkpoint.manifest.checkpoint.program_fingerprint != job.program_fingerprint:
        spikes = spikes.for_other_losses()  # another program may move the losses
    described, own_shards = describe_checkpoint(checkpoint, job.recipe, mesh)
    return CheckpointFinding(described, "", spikes), own_shards


def _open_parent(job: Job) -> Artifact[CheckpointManifest]:
    branch, expected = job.recipe.train.branch, job.lineage.parent
    assert branch
    assert expected
    parent = open_parent(job.root, branch)
    if parent.manifest.content_digest != expected.content_digest:
        raise ArtifactError(
            f"{parent.path}: the parent has written this step again. Start the command again: it starts another run."
        )
    return parent


def load_part(
    job: Job, checkpoint: FoundCheckpoint, own_shard: OwnShard | None, held: Mapping[StateSlice, Tensor]
) -> str:
    """Load a worker's slices of a checkpoint as `read_part` does; return the damage, or an empty text."""
    try:
        read_part(job, checkpoint, own_shard, held)
    except UnreadableError:
        raise
    except ArtifactError as error:
        return str(error)
    return ""


def read_part(
    job: Job, checkpoint: FoundCheckpoint, own_shard: OwnShard | None, held: Mapping[StateSlice, Tensor]
) -> None:
    """Fill the slices that a worker holds from files whose bytes are verified once on each node.

    A worker opens the shard of its own rank alone where that has exactly these slices, as in the layout that wrote it
    under ZeRO-1. Otherwise it opens the manifest, the index, and the shards that have elements of the slices. Raises
    `ArtifactError` for a damaged file, and unless the files have each element once, and values of a training.
    """
    if own_shard and _read_own_shard(job, checkpoint, own_shard, held):
        return
    manifest, shapes = checkpoint.read_manifest(), parameter_shapes(job.recipe.model)
    entries, origins = {entry.path: entry for entry in manifest.files}, manifest.checkpoint.shards
    verify_on_node(job, checkpoint, [entries[INDEX_FILE]])
    places = read_index(checkpoint.path, checkpoint.origin_of(rank=0), shapes, held)
    reader = SliceReader(checkpoint.path, origins, places)
    files = reader.files_of(held)
    logger.info("reading %d of %d shards of %s", len(files), len(origins), checkpoint.path)
    verify_on_node(job, checkpoint, [entries[file] for file in files])
    reader.read(held)


def _read_own_shard(
    job: Job, checkpoint: FoundCheckpoint, own_shard: OwnShard, held: Mapping[StateSlice, Tensor]
) -> bool:
    """Fill the slices from the shard of the worker's rank, and return whether that has exactly these slices.

    Slices of kinds of which none is held do not count.
    """
    file, origin = own_shard.entry.path, checkpoint.origin_of(own_shard.rank)
    verify_on_node(job, checkpoint, [own_shard.entry])
    kinds, places = {piece.kind for piece in held}, Places()
    with open_tensors(checkpoint.path, file, origin) as tensors:
        for piece in read_header(tensors):
            if piece.kind in kinds:
                places.setdefault((piece.kind, piece.name), []).append(Place(piece, file))
        if {place.piece for each in places.values() for place in each} != held.keys():
            return False
        num_shards = checkpoint.header.checkpoint.num_workers
        logger.info("reading 1 of %d shards of %s, this worker's own", num_shards, checkpoint.path)
        SliceReader(checkpoint.path, {file: origin}, places).read_from({file: tensors}, held)
    return True


def load_weights(
    job: Job, program: Program, group: ProcessGroup, find: Callable[[], Artifact[CheckpointManifest]]
) -> None:
    """Load the weights of the checkpoint that rank 0 finds, and leave the moments as they are. All workers call this.

    Raises `ArtifactError` where a file is damaged or the checkpoint is not of the program's model.
    """
    mesh = program.backend.mesh
    checkpoint, own_shards = group.tell(lambda: describe_checkpoint(find(), job.recipe, mesh))
    with program.state.writing() as held:
        weights = {piece: tensor for piece, tensor in held.items() if piece.kind == "weight"}
        group.wait_for_work(partial(read_part, job, checkpoint, own_shards[group.rank], weights))


def _require_seen(checkpoint: FoundCheckpoint, group: ProcessGroup) -> None:
    """Raise `ArtifactError` on all workers where one does not see the checkpoint that rank 0 sees.

    It is not damaged then, so no older one may take its place.
    """
    is_unseen = not checkpoint.path.exists()
    if group.maximum(is_unseen):
        unseen = [rank for rank, each in enumerate(group.gather(is_unseen)) if each]
        raise ArtifactError(
            f"{checkpoint.path}: rank 0 sees this checkpoint, but {len(unseen)} of {group.world_size} workers do not, "
            f"rank {unseen[0]} for one. Mount the same volume on all nodes."
        )
