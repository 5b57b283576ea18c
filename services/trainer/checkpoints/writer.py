"""Writes checkpoints in the background: workers copy state to memory and write shards, and rank 0 commits by a rename.

With each step the workers agree on the checkpoint whose shards all of them have written; then rank 0 commits it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

from services.common.artifacts.checkpoint import (
    CheckpointManifest,
    CheckpointPayload,
    ImportedModel,
    LossSpikes,
    shard_name,
)
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Draft, commit, make_partial
from services.common.errors import ArtifactError, StorageError, TryAgain
from services.common.process.shutdown import check_grace_period
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.sharded_state import ShardedState
from services.trainer.checkpoints.index import Rows, of_all_kinds, tabulate_shards, write_index
from services.trainer.checkpoints.loader import ResumePoint
from services.trainer.checkpoints.lookup import open_checkpoint, verify_state
from services.trainer.checkpoints.retention import discard_old
from services.trainer.checkpoints.shards import pack_shard, write_packed
from services.trainer.job import Job, tokens_after
from services.trainer.metrics.events import record_event

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one worker's shards of checkpoints; rank 0 also commits the checkpoints.

    All workers call every method, in the same order. Each method raises the error of a failed write or commit on the
    worker where it failed.
    """

    def __init__(self, job: Job, mesh: Mesh, group: ProcessGroup) -> None:
        self._job, self._mesh, self._group = job, mesh, group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._snapshot = threading.Lock()  # of its memory, until its bytes are packed
        self._payload: CheckpointPayload | None = None
        self._started = 0.0
        self._writing: Future[list[FileEntry]] | None = None
        self._committing: Future[None] | None = None
        self._is_intact: dict[int, bool] = {}
        """Whether the checkpoint of a step is intact, as far as the workers know by a commit or by reading it."""
        self._imported: ImportedModel | None = None
        self._waivers: tuple[str, ...] = ()
        self._rows: Rows | None = None
        self.slowest_seconds = 0.0
        """Seconds of the slowest checkpoint, from the start of its copy to its commit. Only rank 0 knows it."""

    def save(
        self, state: ShardedState, step: int, skipped_steps: int, stalled_since: float, loss_spikes: LossSpikes
    ) -> None:
        """Start to copy this worker's part of the state after `step` steps, and write it in the background.

        The caller has waited for the save before. Training stands since `stalled_since`, by `time.perf_counter()`.
        """
        assert not self._writing
        assert not self._committing
        if not self._prepare(step):
            return
        self._started = stalled_since
        self._payload = self.describe(step, skipped_steps, loss_spikes)
        shards = {self._group.rank: self.start_shard(state, self._payload)}
        self._writing = self._thread.submit(self._write, self._payload, shards)
        if self._group.rank == 0 and self._rows is None:
            self._rows = of_all_kinds(state.find_owners())

    def describe(self, step: int, skipped_steps: int, loss_spikes: LossSpikes) -> CheckpointPayload:
        """Return the payload of the state after `step` steps, without its shards."""
        recipe, mesh, job = self._job.recipe, self._mesh, self._job
        return CheckpointPayload(
            step=step,
            tokens=tokens_after(recipe, job.lineage.parent, step, skipped_steps),
            skipped_steps=skipped_steps,
            data_parallel_size=mesh.data_parallel_size,
            tensor_parallel_size=mesh.tensor_parallel_size,
            zero_stage=recipe.parallel.zero_stage,
            shards={},
            program_fingerprint=job.program_fingerprint,
            waivers=tuple(sorted({*job.waivers, *self._waivers})),
            loss_spikes=loss_spikes,
            ancestors=job.lineage.ancestors,
            data_offset_samples=job.lineage.data_offset_samples,
            imported=self._imported,
        )

    def start_shard(self, state: ShardedState, payload: CheckpointPayload) -> Callable[[], bytes]:
        """Start to copy this worker's part of the state, once the part before is packed; return what packs it, once."""
        self._snapshot.acquire()
        origin, snapshot = payload.origin(self._job.run, self._group.rank), state.start_snapshot()

        def pack() -> bytes:
            try:
                return pack_shard(origin, snapshot())
            finally:
                self._snapshot.release()

        return pack

    def commit_shards(self, payload: CheckpointPayload, shards: Mapping[int, Callable[[], bytes]]) -> None:
        """Commit a state of which each worker can read the shards of some ranks, and all together each shard once."""
        if self._prepare(payload.step):
            self._started, self._payload = time.perf_counter(), payload
            self._writing = self._thread.submit(self._write, payload, shards)
            self.wait()

    def resume_from(self, point: ResumePoint) -> None:
        """Remember what the workers found in the checkpoint that they loaded, and which others are damaged."""
        self._imported, self._waivers = point.imported, point.waivers
        self._is_intact |= {**dict.fromkeys(point.damaged_steps, False), point.step: True}

    @property
    def written_step(self) -> int:
        """Step of the checkpoint that is not committed yet, once this worker has written its shard; 0 otherwise."""
        return self._payload.step if self._payload and self._writing and self._writing.done() else 0

    def advance(self, written_step: int) -> None:
        """Commit the checkpoint if all workers have written their shards. All workers call this once per step.

        `written_step` is what they have agreed on: the smallest `written_step` of all of them.
        """
        if self._writing:
            assert self._payload
            if self._writing.done():
                self._writing.result()
            if written_step == self._payload.step:
                self._commit()
        elif self._committing and self._committing.done():
            self._committing.result()

    def wait(self) -> None:
        """Wait until the last save is committed, which may take longer than the timeout of a collective."""
        if self._writing:
            self._group.wait_for_work(self._writing.result)
            self._commit()
        committing, self._committing = self._committing, None
        self._group.wait_for_work(committing.result if committing else lambda: None)

    def _prepare(self, step: int) -> bool:
        """Make the folder that all workers write into.

        Returns False if the checkpoint exists: an earlier attempt was killed after it had committed these bytes.
        """
        address = self._job.checkpoint_address(step)

        def prepare() -> bool:
            if self._group.rank > 0 or (address.path.exists() and self._looks_intact(step)):
                return False
            make_partial(address, self._job.writer)
            return True

        return bool(self._group.maximum(self._group.wait_for_work(prepare)))

    def _looks_intact(self, step: int) -> bool:
        """Return whether a checkpoint is intact as far as the workers know, or as its manifest and its sizes tell."""
        if step not in self._is_intact:
            try:
                verify = verify_state(self._job.recipe, self._job.corpus, "size")
                open_checkpoint(self._job.checkpoint_collection, step, verify)
                self._is_intact[step] = True
            except (ArtifactError, TryAgain, OSError):  # some of these mean that it cannot be read now
                self._is_intact[step] = False
        return self._is_intact[step]

    def _write(self, payload: CheckpointPayload, shards: Mapping[int, Callable[[], bytes]]) -> list[FileEntry]:
        with self._recording_failure(payload.step):
            folder = self._job.checkpoint_address(payload.step).partial(self._job.writer)
            return [write_packed(folder, shard_name(rank), read()) for rank, read in shards.items()]

    @contextmanager
    def _recording_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, StorageError) as error:
            record_event(self._job, "checkpoint_failed", step=step, rank=self._group.rank, error=str(error))
            if isinstance(error, FileNotFoundError):  # the next holder of the run's lock removes partial folders
                raise TryAgain(f"{error.filename}: removed by another attempt, which holds the run's lock.") from error
            raise

    def _commit(self) -> None:
        assert self._writing
        written, self._writing = self._writing.result(), None
        entries = sorted(chain(*self._group.gather(written)), key=lambda entry: entry.path)
        if self._group.rank == 0:
            self._committing = self._thread.submit(self._publish, entries)

    def _publish(self, shards: Sequence[FileEntry]) -> None:
        job, payload = self._job, self._payload
        assert payload
        address = job.checkpoint_address(payload.step)
        partial = address.partial(job.writer)
        with self._recording_failure(payload.step):
            ranks = {shard_name(rank): rank for rank in range(payload.num_workers)}
            complete = payload.with_shards(job.run, ranks)
            rows = self._rows or tabulate_shards(partial, complete.shards)
            index = write_index(partial, payload.origin(job.run, rank=0), rows)
            draft = Draft(complete, job.corpus.links, (*shards, index))
            commit(address, CheckpointManifest, "trainer", job.recipe, draft, partial)
        logger.info("committed checkpoint step=%d", payload.step)
        slowest = max(self.slowest_seconds, time.perf_counter() - self._started)
        message = check_grace_period(slowest)
        if message and not check_grace_period(self.slowest_seconds):  # once
            record_event(job, "short_notice", step=payload.step, message=message)
        self.slowest_seconds = slowest
        self._is_intact[payload.step] = True
        discard_old(job.checkpoint_collection, job.recipe, payload.step, self._looks_intact)
