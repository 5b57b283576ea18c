"""Copies the state into the memory of nodes every few steps, so that a killed worker or a lost node costs no more.

Each worker keeps its shard in its node's memory, and sends it to its counterpart on the next node. When workers start,
the newest state of which all shards are left is committed as a checkpoint, from which they resume. A copy costs each
worker the bytes that it owns once to write and once to send, and all workers the exchange of four numbers. Where a
node has no room for a copy, it is left out. Copies are not compared between workers, which would hash all weights.

    /dev/shm/millrace-<run>-<first attempt>/node-0/<step>-<rank>/  a shard, and `copy.json`
"""
# Ours, because torch.distributed.checkpoint stages into the process that dies, Ray frees objects whose owner died, and
# Ray Train knows its storage alone.

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointPayload, LossSpikes, ShardOrigin, merge_ranges, shard_name
from services.common.artifacts.files import find_damages, require_undamaged
from services.common.artifacts.manifest import FileEntry, ManifestModel
from services.common.errors import ArtifactError, LimitError, adding_path
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.mesh import COLLECTIVE_TIMEOUT
from services.common.program.process_group import ProcessGroup, connecting, naming_lost_workers
from services.common.recipe.memory_estimate import memory_copy_bytes, show_size
from services.trainer.checkpoints.lookup import open_checkpoint
from services.trainer.checkpoints.shards import write_packed
from services.trainer.checkpoints.steps import newest_step
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.job import ALLOW_CHANGED_PROGRAM, Job
from services.trainer.metrics.commands import read_commands
from services.trainer.metrics.events import record_event

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # nosec B108 # folders there are for their user alone
ENTRY_BYTES = 512
"""Bytes of a message with the entry of a shard."""


class State(NamedTuple):
    """A state of which there are copies."""

    num_skipped_batches: int
    """Batches that the run had left out: more after each rollback, which goes back to an earlier step."""
    origin: ShardOrigin
    start: str
    """The start of the workers that made the copies."""


class Copy(ManifestModel):
    """Content of `copy.json`: a shard, and the state that it is of."""

    shard: FileEntry
    payload: CheckpointPayload
    start: str
    """The start of the workers that made it. Shards of different starts are not combined."""


class MemoryCheckpoints:
    """One worker's part in the copies. All workers call every method, in the same order.

    Two states have room: the newest one that all workers have kept, and the one that is being copied.
    """

    def __init__(self, job: Job, environment: WorkerEnvironment, group: ProcessGroup, writer: CheckpointWriter) -> None:
        """Commit the newest state of which all shards are left, if it is newer than all checkpoints, and make room.

        Raises `LimitError` where a node's memory has too little, and `ArtifactError` where another program made that
        state and the command does not allow it; then all copies stay.
        """
        self._job, self._environment, self._group = job, environment, group
        self._interval = job.recipe.checkpoint.memory_interval_steps
        # A run whose folder was deleted begins with another attempt, and does not find copies of before.
        first = group.tell(lambda: next((each.attempt for each in read_commands(job.run_folder)), job.attempt))
        self._folder = MEMORY / f"millrace-{job.run}-{first[:8]}"
        self._node_size = group.maximum(environment.local_world_size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory-checkpoint")
        self._peers: Any = None
        self._copying: Future[list[Path]] | None = None
        self._kept: list[Path] = []
        self.step = 0
        """Step of the newest state that was copied, or from which the workers have started."""
        self._commit_newest(writer)
        if environment.local_rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        if not self._interval:
            return
        group.barrier()
        num_nodes = -(-group.world_size // self._node_size)
        needed = memory_copy_bytes(job.recipe, num_nodes)
        if (free := shutil.disk_usage(MEMORY).free if MEMORY.exists() else 0) < needed:
            raise LimitError(
                f"{MEMORY}: {show_size(free)} free, but checkpoint.memory_interval_steps needs {show_size(needed)} on "
                f"each node. Remove copies of dead runs ({MEMORY}/millrace-*), give the container a larger {MEMORY}, "
                f"or leave that key out."
            )
        self._copy_bytes, self._sends = needed // 2, num_nodes > 1
        if group.world_size > 1:
            with connecting(), naming_lost_workers():
                # A group of its own: its messages never meet those of the steps.
                self._peers = dist.new_group(timeout=COLLECTIVE_TIMEOUT, backend="gloo")
                self._agree(True)
                if self._sends:
                    self._exchange(torch.zeros(1), torch.zeros(1))

    def is_due(self, step: int) -> bool:
        """Whether an interval is over since the newest copy."""
        return self._interval is not None and step // self._interval > self.step // self._interval

    def save(self, payload: CheckpointPayload, pack: Callable[[], bytes]) -> None:
        """Copy a state in the background; `pack` returns the worker's shard. The caller has waited for the last one."""
        self.step = payload.step
        self._copying = self._thread.submit(adding_path(MEMORY)(self._copy), payload, pack)

    def wait(self) -> None:
        """Wait until all workers have kept the newest state, and remove the one before. Raises the error of a copy."""
        copying, self._copying = self._copying, None
        kept = self._group.wait_for_work(copying.result) if copying else []
        if kept:
            for folder in self._kept:
                self._thread.submit(shutil.rmtree, folder)
            self._kept = kept

    def discard(self) -> None:
        """Remove all copies: the run goes back, or has ended."""
        self.wait()
        self._thread.submit(shutil.rmtree, self._folder, ignore_errors=True).result()
        self._kept = []

    def _copy(self, payload: CheckpointPayload, pack: Callable[[], bytes]) -> list[Path]:
        """Keep the shard, send it to the next node, and keep that of the node before. Return this worker's folders,
        or none where a node has no room.
        """
        packed = pack()  # first, because it frees the snapshot, for which a checkpoint may wait
        rank, size = self._group.rank, self._group.world_size
        has_room = self._have_room(payload.step)
        own = has_room and self._make(payload, rank, lambda folder: write_packed(folder, shard_name(rank), packed))
        if not own or not self._sends:
            return [own[0]] if own else []
        sent, received = bytearray(json.dumps(asdict(own[1])).encode().ljust(ENTRY_BYTES)), bytearray(ENTRY_BYTES)
        self._exchange(*(torch.frombuffer(each, dtype=torch.uint8) for each in (sent, received)))
        theirs = FileEntry(**json.loads(received))
        other = self._make(payload, (rank - self._node_size) % size, lambda folder: _allocate(folder, theirs))
        if not other:
            shutil.rmtree(own[0])
            return []
        self._exchange(_map(*own), _map(*other))
        return [own[0], other[0]]

    def _make(
        self, payload: CheckpointPayload, rank: int, write: Callable[[Path], FileEntry]
    ) -> tuple[Path, FileEntry] | None:
        """Make the folder of a copy of a rank's shard, which `write` writes into it; None where a worker cannot.

        Whoever reads it compares checksums, also of a shard that is still on its way.
        """
        node = self._folder / f"node-{self._environment.node_rank}"
        folder, shard = node / f"{payload.step:08d}-{rank:05d}", None
        try:
            for each in (self._folder, node, folder):
                each.mkdir(mode=0o700, exist_ok=True)
            written = write(folder)
            copy = Copy(shard=written, payload=payload, start=f"{self._job.attempt}-{self._job.start_number}")
            (folder / "copy.json").write_text(copy.model_dump_json(), encoding="utf-8")
            shard = written
        except OSError as error:  # raised here it would leave the others waiting for this worker
            record_event(self._job, "copy_left_out", step=payload.step, rank=self._group.rank, error=str(error))
        if self._agree(shard is not None) and shard:
            return folder, shard
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def _have_room(self, step: int) -> bool:
        """Tell whether all nodes have room for another copy: Ray's objects and other runs use that memory, too."""
        free = shutil.disk_usage(MEMORY).free
        has_room = free >= self._copy_bytes
        if not has_room and self._environment.local_rank == 0:  # once a node
            record_event(self._job, "copy_left_out", step=step, rank=self._group.rank, free_bytes=free)
        return self._agree(has_room)

    def _agree(self, is_true: bool) -> bool:
        """Tell whether something is true on all workers."""
        agreed = torch.tensor(int(is_true))
        if self._peers:
            with naming_lost_workers():
                dist.all_reduce(agreed, dist.ReduceOp.MIN, self._peers)
        return bool(agreed)

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        """Send to the worker of this local rank on the next node, and receive from that on the node before."""
        size, rank = self._group.world_size, self._group.rank
        with naming_lost_workers():
            work = dist.isend(sent, (rank + self._node_size) % size, group=self._peers)
            dist.recv(received, (rank - self._node_size) % size, group=self._peers)
            assert work
            work.wait()

    def _commit_newest(self, writer: CheckpointWriter) -> None:
        rank, (committed, spikes) = self._group.rank, self._group.tell(self._read_committed)
        found = self._group.wait_for_work(lambda: self._find_copies(committed, spikes))
        holders = defaultdict[State, dict[int, int]](dict)
        for worker, held in enumerate(self._group.gather({state: list(copies) for state, copies in found.items()})):
            for state, ranks in held.items():
                holders[state] = dict.fromkeys(ranks, worker) | holders[state]
        sizes = {state: state.origin.data_parallel_size * state.origin.tensor_parallel_size for state in holders}
        complete = [state for state, size in sizes.items() if len(holders[state]) == size]
        if complete:
            newest = max(complete, key=lambda state: (state.num_skipped_batches, state.origin.step))
            made, step = newest.origin.program_fingerprint, newest.origin.step
            if made != self._job.program_fingerprint and not self._job.allows_changed_program:
                raise ArtifactError(
                    f"{self._folder}: the copies of step {step:,} are of program {made[:12]}, but this program is "
                    f"{self._job.program_fingerprint[:12]}. The next steps may have other bits. Continue with the "
                    f"program that made them, pass {ALLOW_CHANGED_PROGRAM}, which the next checkpoints record, or "
                    f"remove that folder on all nodes to go on without them."
                )
            own = {shard: found[newest][shard] for shard, worker in holders[newest].items() if worker == rank}
            payloads = self._group.gather(own[0][1] if 0 in own else None)
            shards = {shard: (folder / shard_name(shard)).read_bytes for shard, (folder, _) in own.items()}
            writer.commit_shards(next(filter(None, payloads)), shards)
            if rank == 0:
                record_event(self._job, "recovered", step=step, committed_step=committed)

    def _read_committed(self) -> tuple[int, LossSpikes]:
        """Return the step of the newest checkpoint, whether or not it is intact, and its state of loss spikes."""
        collection = self._job.checkpoint_collection
        step = newest_step(collection)
        with suppress(ArtifactError):
            if step is not None:
                return step, open_checkpoint(collection, step, lambda _: None).manifest.checkpoint.loss_spikes
        return step or 0, LossSpikes()

    def _find_copies(
        self, committed_step: int, committed: LossSpikes
    ) -> dict[State, dict[int, tuple[Path, CheckpointPayload]]]:
        """Return this worker's share of the node's intact copies of later steps, by state and rank.

        A copy of before a rollback, on a node that comes back, lacks the batches that the run has skipped since.
        """
        found = defaultdict[State, dict[int, tuple[Path, CheckpointPayload]]](dict)
        local_rank, local_size = self._environment.local_rank, self._environment.local_world_size
        for folder in sorted(self._folder.glob("node-*/[0-9]*"))[local_rank::local_size]:
            try:
                if folder.stat().st_uid != os.getuid():
                    raise PermissionError(f"{folder} is another user's")
                copy = Copy.model_validate_json((folder / "copy.json").read_bytes())
                require_undamaged(folder, 1, find_damages(folder, [copy.shard], "full"))
            except (OSError, ValueError, ArtifactError) as error:  # of another user, or half removed
                logger.warning("this copy is left out: %s", error)
                continue
            payload, skipped = copy.payload, copy.payload.loss_spikes.skipped_batches
            state = State(sum(map(len, skipped)), payload.origin(self._job.run, rank=0), copy.start)
            if payload.step > committed_step and merge_ranges([*skipped, *committed.skipped_batches]) == skipped:
                found[state][int(folder.name.partition("-")[2])] = folder, payload
        return found


def _allocate(folder: Path, shard: FileEntry) -> FileEntry:
    """Make the file of a shard with its memory: a map that finds none would end the process."""
    with (folder / shard.path).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shard.bytes)
    return shard


def _map(folder: Path, shard: FileEntry) -> Tensor:
    return torch.from_file(str(folder / shard.path), shared=True, size=shard.bytes, dtype=torch.uint8)
