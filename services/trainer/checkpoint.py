"""Checkpoints: staged to memory, written in the background, committed by one rename, resumed by verification."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
from torch import Tensor

from services.common.artifacts.checkpoint import MOMENTS, WEIGHTS, CheckpointManifest, CheckpointPayload
from services.common.artifacts.files import verify_files
from services.common.artifacts.lease import Lease, naming_a_lost_lease
from services.common.artifacts.store import (
    Artifact,
    Draft,
    begin_partial,
    commit,
    discard,
    open_artifact,
    published_ids,
)
from services.common.errors import ArtifactError
from services.common.program.step import Program
from services.common.recipe import Checkpoint
from services.trainer.job import Job

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of rank 0. Every worker of a data-parallel group holds the same state."""

    def __init__(self, job: Job, data_parallel_size: int) -> None:
        self._job = job
        self._data_parallel_size = data_parallel_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.slowest_seconds = 0.0
        """Of the checkpoints so far, from the first copy to the commit."""

    def save(self, program: Program, step: int, skipped_steps: int) -> float:
        """Stage the state after `step` steps; returns the seconds that training stood still for it.

        An earlier save that is still being written is waited for, and its failure raised here.
        """
        start = time.perf_counter()
        self.wait()
        weights = {name: view.clone() for name, view in program.weights().items()}
        moments = {name: view.clone() for name, view in program.moments().items()}
        recipe = self._job.recipe
        payload = CheckpointPayload(
            step=step,
            tokens=step * recipe.batch.global_batch_size * recipe.corpus.sequence_length,
            skipped_steps=skipped_steps,
            data_parallel_size=self._data_parallel_size,
            program_fingerprint=self._job.program_fingerprint,
            waivers=self._job.waivers,
        )
        self._pending = self._thread.submit(self._write, payload, weights, moments, start)
        return time.perf_counter() - start

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
        discard_old(job.checkpoint_shelf, job.recipe.checkpoint, payload.step, job.lease)


def newest_checkpoint(shelf: Path) -> Artifact[CheckpointManifest] | None:
    """The newest checkpoint that verifies; damaged ones are reported and passed over.

    Raises `ArtifactError` when there are checkpoints and all of them are damaged: starting again from
    nothing would not be what the user meant.
    """
    damages = []
    for name in reversed(_checkpoint_names(shelf)):
        try:
            checkpoint = _open_verified(shelf / name)
        except ArtifactError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
            damages.append(f"{name}: {error}")
        else:
            return checkpoint
    if damages:
        raise ArtifactError(
            f"{shelf}: all {len(damages)} checkpoints are damaged:\n  " + "\n  ".join(damages) + f"\n"
            f"Restore one from a copy, or move {shelf} away to start this run from step 0."
        )
    return None


def _checkpoint_names(shelf: Path) -> list[str]:
    """Published checkpoints in the order of their steps; not what a person has renamed."""
    return [name for name in published_ids(shelf) if re.fullmatch(r"step-\d{8}", name)]


def _open_verified(folder: Path) -> Artifact[CheckpointManifest]:
    checkpoint = open_artifact(folder, CheckpointManifest)
    verify_files(checkpoint.path, checkpoint.manifest)
    return checkpoint


def _is_intact(folder: Path) -> bool:
    try:
        _open_verified(folder)
    except ArtifactError:
        return False
    return True


def load_checkpoint(checkpoint: Artifact[CheckpointManifest], program: Program) -> None:
    """Put a verified checkpoint's weights and moments into the program."""
    tensors = safetensors.torch.load_file(checkpoint.path / WEIGHTS)
    program.load(tensors | safetensors.torch.load_file(checkpoint.path / MOMENTS))


def discard_old(shelf: Path, policy: Checkpoint, committed_step: int, lease: Lease) -> None:
    """Remove all but the newest checkpoints up to `committed_step` and those that the policy keeps for good.

    Later ones are damaged, or the run would have continued from them; they must not push out intact ones.
    """
    steps = [int(name.removeprefix("step-")) for name in _checkpoint_names(shelf)]
    for step in [step for step in steps if step <= committed_step][: -policy.keep_latest]:
        name = f"step-{step:08d}"
        if policy.keep_interval_steps and step % policy.keep_interval_steps == 0:
            continue
        discard(shelf / name, lease)
