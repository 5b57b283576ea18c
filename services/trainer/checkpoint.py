"""Checkpoints: staged to memory, written in the background, committed by one rename, resumed by verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from services.common.artifacts.checkpoint import (
    MOMENTS,
    WEIGHTS,
    CheckpointManifest,
    CheckpointPayload,
    checkpoint_id,
    step_of,
)
from services.common.artifacts.files import locate, verify_files
from services.common.artifacts.lease import Lease, naming_a_lost_lease
from services.common.artifacts.store import (
    Artifact,
    Draft,
    begin_partial,
    commit,
    discard,
    open_artifact,
    published_ids,
    require_in_place,
)
from services.common.errors import ArtifactError, TryAgain, UnreadableError
from services.common.program.step import Program
from services.common.recipe import Checkpoint, Recipe
from services.trainer.job import Job

logger = logging.getLogger(__name__)


class CheckpointSchedule:
    """When a checkpoint is due."""

    def __init__(self, recipe: Recipe) -> None:
        self._interval_steps, self._max_steps = recipe.checkpoint.interval_steps, recipe.train.max_steps
        self._is_interval_over = False

    def is_due(self, step: int, is_stopping: bool, is_applied: bool) -> bool:
        """Asked once after each step: is it the last one, a stop's, or an update with which the interval is over?

        The interval does not end with a skipped step. The checkpoint would hold nothing new, and in a run that diverges
        it would push out one from before.
        """
        self._is_interval_over |= step % self._interval_steps == 0
        return step == self._max_steps or is_stopping or (self._is_interval_over and is_applied)

    def saved(self) -> None:
        """Begin another interval."""
        self._is_interval_over = False


class CheckpointWriter:
    """Writes the checkpoints of rank 0. Every worker of a data-parallel group holds the same state."""

    def __init__(self, job: Job, data_parallel_size: int) -> None:
        self._job = job
        self._data_parallel_size = data_parallel_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.slowest_seconds = 0.0
        """Of the checkpoints so far, from when training stood still to the commit."""

    def save(
        self,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        step: int,
        skipped_steps: int,
        started: float,
    ) -> None:
        """Stage the state after `step` steps and begin to write it. The save before it has been waited for.

        `started` is the `time.perf_counter()` since which training stands still for it.
        """
        assert self._pending is None
        recipe = self._job.recipe
        payload = CheckpointPayload(
            step=step,
            tokens=step * recipe.batch.global_batch_size * recipe.corpus.sequence_length,
            skipped_steps=skipped_steps,
            data_parallel_size=self._data_parallel_size,
            program_fingerprint=self._job.program_fingerprint,
            waivers=self._job.waivers,
        )
        self._pending = self._thread.submit(self._write, payload, _staged(weights), _staged(moments), started)

    def raise_failure(self) -> None:
        """Raise what a finished background write failed with, without waiting for one that is under way."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return once the last save is committed, or raise what it failed with."""
        if self._pending:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(
        self,
        payload: CheckpointPayload,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        started: float,
    ) -> None:
        job, address = self._job, self._job.checkpoint_address(payload.step)
        if _is_intact(address.path):  # written by an attempt that was killed right after: the same bytes
            return
        assert job.lease is not None
        inputs = (job.corpus.manifest.link(job.corpus.path),)
        with naming_a_lost_lease(job.lease):  # also to a newer attempt of this command
            partial = begin_partial(address, job.lease)
            for file_name, tensors in ((WEIGHTS, weights), (MOMENTS, moments)):
                # Through a Python file: safetensors' own writer reports a full disk without its errno.
                with (partial / file_name).open("wb") as file:
                    file.write(safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
            commit(address, CheckpointManifest, "trainer", job.recipe, Draft(payload, inputs), job.lease)
        logger.info("committed checkpoint step=%d", payload.step)
        self.slowest_seconds = max(self.slowest_seconds, time.perf_counter() - started)
        discard_old(job.checkpoint_collection, job.recipe.checkpoint, payload.step, job.lease)


def _staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def verify_checkpoint(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Raise `ArtifactError` that names the files that are damaged."""
    verify_files(checkpoint.path, checkpoint.manifest)


def newest_checkpoint(
    collection: Path, verify: Callable[[Artifact[CheckpointManifest]], None] = verify_checkpoint
) -> Artifact[CheckpointManifest] | None:
    """The newest checkpoint that verifies; damaged ones are reported and passed over.

    Raises `UnreadableError` for one that this user may not read: it may be intact. Raises `ArtifactError` when there
    are checkpoints and all of them are damaged: starting again from nothing would not be what the user meant.
    """
    damages = []
    for step in reversed(_checkpoint_steps(collection)):
        name = checkpoint_id(step)
        try:
            checkpoint = _open_verified(collection / name, verify)
        except UnreadableError:
            raise
        except ArtifactError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
            damages.append(f"{name}: {error}")
        else:
            return checkpoint
    if damages:
        raise ArtifactError(
            f"{collection}: all {len(damages)} checkpoints are damaged:\n  " + "\n  ".join(damages) + f"\n"
            f"Restore one from a copy, or move {collection} away to start this run from step 0."
        )
    return None


def _checkpoint_steps(collection: Path) -> list[int]:
    """Steps of the published checkpoints, ascending; not what a person has renamed."""
    return sorted(step for name in published_ids(collection) if (step := step_of(name)) is not None)


def _open_verified(
    folder: Path, verify: Callable[[Artifact[CheckpointManifest]], None] = verify_checkpoint
) -> Artifact[CheckpointManifest]:
    checkpoint = require_in_place(open_artifact(folder, CheckpointManifest))
    step = checkpoint.manifest.checkpoint.step
    if folder.name != checkpoint_id(step):
        raise ArtifactError(f"{folder}: its manifest says that it is the state after step {step:,}.")
    verify(checkpoint)
    return checkpoint


def _is_intact(folder: Path) -> bool:
    try:
        _open_verified(folder)
    except (ArtifactError, TryAgain, OSError):  # also what cannot be read at this moment
        return False
    return True


def newest_step(collection: Path) -> int | None:
    """Of the committed checkpoints, without a look at whether they verify."""
    return max(_checkpoint_steps(collection), default=None)


def load_checkpoint(checkpoint: Artifact[CheckpointManifest], program: Program) -> None:
    """Put a verified checkpoint's weights and moments into the program. Raises `ArtifactError` when they do not fit."""
    weights, moments = program.state_shapes()
    program.load(load_tensors(checkpoint, WEIGHTS, weights) | load_tensors(checkpoint, MOMENTS, moments))


def load_tensors(
    checkpoint: Artifact[CheckpointManifest], file_name: str, expected: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """The tensors in a file of a verified checkpoint: float32, with the names and shapes of `expected`.

    Raises `ArtifactError` for any others: copying would stretch a tensor of one element over a whole matrix.
    """
    path = locate(checkpoint.path, file_name)
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wanted = {name: (tuple(shape), torch.float32) for name, shape in expected.items()}
    if found != wanted:
        name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
        raise ArtifactError(
            f"{path}: holds other tensors than the recipe's model: {name} is {_describe(found.get(name))}, "
            f"expected {_describe(wanted.get(name))}."
        )
    return tensors


def _describe(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{tensor[1]} {list(tensor[0])}" if tensor else "none"


def discard_old(collection: Path, policy: Checkpoint, committed_step: int, lease: Lease) -> None:
    """Remove what is older than the `keep_latest` newest intact checkpoints, but for those that are kept for good.

    `committed_step` has just been committed; the others count once they verify, by their checksums. Damaged ones among
    those that are kept stay where they are, for a person to look at. Later ones are damaged too, or the run would have
    continued from them. A removal that fails is reported: the run needs none.
    """
    steps = [step for step in reversed(_checkpoint_steps(collection)) if step <= committed_step]
    intact = 0
    for step in steps:
        if intact >= policy.keep_latest:
            if not policy.keep_interval_steps or step % policy.keep_interval_steps:
                _discard(collection / checkpoint_id(step), lease)
        elif len(steps) > policy.keep_latest:
            intact += step == committed_step or _is_intact(collection / checkpoint_id(step))


def _discard(checkpoint: Path, lease: Lease) -> None:
    try:
        discard(checkpoint, lease)
    except OSError as error:
        logger.warning("%s: an old checkpoint could not be removed: %s", checkpoint, error)
