"""Checkpoints as a run makes them: staged to memory, written by all workers in the background, committed by one rename.

While a checkpoint is written, the workers ask each other once a step whether all shards are there; then rank 0 commits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from services.common.artifacts.checkpoint import (
    CheckpointManifest,
    CheckpointPayload,
    LossSpikes,
    checkpoint_id,
    shard_name,
)
from services.common.artifacts.lease import Lease, naming_a_lost_lease
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Draft, begin_partial, commit, discard, partial_of
from services.common.process.termination_notice import explain_short_notice
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateSlice
from services.common.recipe.schema import Checkpoint, Recipe
from services.trainer.checkpoints.lookup import Verify, checkpoint_steps, is_intact, verify_state
from services.trainer.checkpoints.shards import write_shard
from services.trainer.job import Job
from services.trainer.metrics.events import record_event

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
    """A worker's part in the checkpoints: it writes what it owns, and rank 0 commits what all have written.

    Every method is called by all workers, in the same order. All raise what a write or the commit failed with, on the
    worker where it did.
    """

    def __init__(self, job: Job, mesh: Mesh, group: ProcessGroup) -> None:
        assert job.lease is not None
        self._job, self._mesh, self._group, self._lease = job, mesh, group, job.lease
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._payload: CheckpointPayload | None = None
        self._started = 0.0
        self._writing: Future[FileEntry] | None = None
        self._committing: Future[None] | None = None
        self._committed_steps: list[int] = []
        self.slowest_seconds = 0.0
        """Of the checkpoints so far, from when training stood still to the commit; known to rank 0."""
        self._is_short_notice_told = False
        self._verify = verify_state(job.recipe, job.corpus)

    def save(
        self,
        begin_snapshot: Callable[[], Callable[[], Mapping[StateSlice, Tensor]]],
        step: int,
        skipped_steps: int,
        started: float,
        loss_spikes: LossSpikes | None = None,
    ) -> None:
        """Begin a copy of what this worker owns of the state after `step` steps, and write it once it is there. The
        save before it has been waited for.

        `started` is the `time.perf_counter()` since which training stands still for it.
        """
        assert not self._writing
        assert not self._committing
        recipe, mesh, job = self._job.recipe, self._mesh, self._job
        if not self._begin(step):
            return
        self._started = started
        self._payload = CheckpointPayload(
            step=step,
            tokens=step * recipe.batch.global_batch_size * recipe.corpus.sequence_length,
            skipped_steps=skipped_steps,
            data_parallel_size=mesh.data_parallel_size,
            tensor_parallel_size=mesh.tensor_parallel_size,
            zero_stage=recipe.parallel.zero_stage,
            shards={},
            program_fingerprint=job.program_fingerprint,
            waivers=job.waivers,
            loss_spikes=loss_spikes,
        ).with_shards(job.run, {shard_name(rank): rank for rank in range(mesh.world_size)})
        self._writing = self._thread.submit(self._write, self._payload, begin_snapshot())

    def advance(self) -> None:
        """Called once a step: commit the checkpoint once all workers have written their shards."""
        if self._writing:
            if self._writing.done():
                self._writing.result()
            if not self._group.maximum(not self._writing.done()):
                self._commit()
        elif self._committing and self._committing.done():
            self._committing.result()

    def wait(self) -> None:
        """Return once the last save is committed, which may take longer than a collective."""
        if self._writing:
            self._group.wait_for_work(self._writing.result)
            self._commit()
        committing, self._committing = self._committing, None
        self._group.wait_for_work(committing.result if committing else lambda: None)

    def _begin(self, step: int) -> bool:
        """Make the folder that all write into; False when there is a checkpoint that an attempt wrote which was killed
        right after: it has the same bytes.
        """
        address = self._job.checkpoint_address(step)

        def prepare() -> bool:
            if self._group.rank > 0:
                return False
            if address.path.exists() and is_intact(address.collection, step, self._verify):
                return False
            with naming_a_lost_lease(self._lease):
                begin_partial(address, self._lease)
            return True

        return bool(self._group.maximum(self._group.wait_for_work(prepare)))

    def _write(self, payload: CheckpointPayload, snapshot: Callable[[], Mapping[StateSlice, Tensor]]) -> FileEntry:
        with naming_a_lost_lease(self._lease):  # also to a newer attempt of this command
            folder = partial_of(self._job.checkpoint_address(payload.step), self._lease)
            file = shard_name(self._group.rank)
            return write_shard(folder, file, payload.shards[file], snapshot())

    def _commit(self) -> None:
        assert self._writing
        entry, self._writing = self._writing.result(), None
        entries = tuple(FileEntry.model_validate(each) for each in self._group.gather(entry.model_dump(mode="json")))
        if self._group.rank == 0:
            self._committing = self._thread.submit(self._publish, entries)

    def _publish(self, files: tuple[FileEntry, ...]) -> None:
        job, payload = self._job, self._payload
        assert payload
        draft = Draft(payload, (job.corpus.manifest.link(job.corpus.path),), files)
        with naming_a_lost_lease(self._lease):
            commit(job.checkpoint_address(payload.step), CheckpointManifest, "trainer", job.recipe, draft, self._lease)
        logger.info("committed checkpoint step=%d", payload.step)
        seconds = time.perf_counter() - self._started
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        told = "" if self._is_short_notice_told else explain_short_notice(seconds)
        if told:
            self._is_short_notice_told = True
            record_event(job, "short_notice", step=payload.step, message=told)
        self._committed_steps.append(payload.step)
        discard_old(job.checkpoint_collection, job.recipe.checkpoint, self._committed_steps, self._lease, self._verify)


def discard_old(
    collection: Path, policy: Checkpoint, committed_steps: Sequence[int], lease: Lease, verify: Verify
) -> None:
    """Remove what is older than the `keep_latest` newest intact checkpoints, but for those that are kept for good.

    `committed_steps` were committed by this process, the last one just now; the others count once they verify. Damaged
    ones among those that are kept stay where they are, for a person to look at. Later ones are damaged too, or the run
    would have continued from them. A removal that fails is reported: the run needs none.
    """
    steps = [step for step in reversed(checkpoint_steps(collection)) if step <= committed_steps[-1]]
    intact = 0
    for step in steps:
        if intact >= policy.keep_latest:
            if not policy.keep_interval_steps or step % policy.keep_interval_steps:
                _discard(collection / checkpoint_id(step), lease)
        elif len(steps) > policy.keep_latest:
            intact += step in committed_steps or is_intact(collection, step, verify)


def _discard(checkpoint: Path, lease: Lease) -> None:
    try:
        discard(checkpoint, lease)
    except OSError as error:
        logger.warning("%s: an old checkpoint could not be removed: %s", checkpoint, error)
