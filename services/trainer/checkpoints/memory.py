"""Copies the state into the memory of nodes every few steps, so that a killed worker or a lost node costs no more.

Each worker keeps its shard in its node's memory, and sends it to its counterpart on the next node. When workers start,
the newest state of which all shards are left is committed as a checkpoint, from which they resume.

    /dev/shm/millrace-<run>-<id>/lock                   link to the run's lock, which its command holds
    /dev/shm/millrace-<run>-<id>/node-0/<step>-<rank>/  a shard, and `copy.json`
"""
# Ours, because torch.distributed.checkpoint stages into the process that dies, Ray frees objects whose owner died, and
# Ray Train knows its storage alone.

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointPayload, ShardOrigin, shard_name
from services.common.artifacts.files import find_damages
from services.common.artifacts.lock import find_holder
from services.common.artifacts.manifest import Count, FileEntry, ManifestModel
from services.common.errors import LimitError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program import process_group
from services.common.program.process_group import ProcessGroup, connecting, naming_lost_workers
from services.common.recipe.memory_estimate import memory_copy_bytes, show_size
from services.trainer.checkpoints.shards import write_packed
from services.trainer.checkpoints.steps import newest_step
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.job import Job
from services.trainer.metrics.events import record_event

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # nosec B108 # folders there are for their user alone
ENTRY_BYTES = 512
"""Bytes of a message with the entry of a shard."""


class Copy(ManifestModel):
    """Content of `copy.json`: a shard, and the state that it is of."""

    rank: Count
    shard: FileEntry
    payload: CheckpointPayload


class MemoryCheckpoints:
    """One worker's part in the copies. All workers call every method, in the same order.

    Two states have room: the newest one that all workers have kept, and the one that is being copied.
    """

    def __init__(self, job: Job, environment: WorkerEnvironment, group: ProcessGroup) -> None:
        self._job, self._group = job, group
        self._interval = job.recipe.checkpoint.memory_interval_steps
        self._local_rank, self._local_size = environment.local_rank, group.maximum(environment.local_world_size)
        # By the run folder's number too: a run that is begun anew, in a new folder, does not find copies of before.
        self._folder = MEMORY / f"millrace-{job.run}-{group.tell(lambda: job.run_folder.stat().st_ino)}"
        self._node_folder = self._folder / f"node-{environment.node_rank}"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memory-checkpoint")
        self._peers: Any = None
        self._copying: Future[list[Path]] | None = None
        self._kept: list[Path] = []
        self.step = 0
        """Step of the newest state that was copied, or from which the workers have started."""

    def recover(self, writer: CheckpointWriter) -> None:
        """Commit the newest state of which all shards are left, if it is newer than all checkpoints, and make room.

        Raises `LimitError` where a node's memory has too little.
        """
        if self._interval:
            self._commit_newest(writer)
        if self._local_rank == 0:
            _remove_leftovers(self._job)
        if not self._interval:
            return
        self._group.barrier()
        num_nodes = -(-self._group.world_size // self._local_size)
        needed = memory_copy_bytes(self._job.recipe, num_nodes)
        if (free := shutil.disk_usage(MEMORY).free if MEMORY.exists() else 0) < needed:
            raise LimitError(
                f"{MEMORY}: {show_size(free)} free on a node, but checkpoint.memory_interval_steps needs "
                f"{show_size(needed)} there. Give its container a larger {MEMORY}, or leave that key out."
            )
        self._node_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (self._folder / "lock").symlink_to(self._job.lock.absolute())
        if num_nodes > 1:
            with connecting(), naming_lost_workers():
                # A group of its own: its messages never meet those of the steps.
                self._peers = dist.new_group(timeout=process_group.COLLECTIVE_TIMEOUT, backend=process_group.GLOO)
                self._exchange(torch.zeros(1), torch.zeros(1))

    def is_due(self, step: int) -> bool:
        """Whether an interval is over since the newest copy."""
        return self._interval is not None and step // self._interval > self.step // self._interval

    def save(self, payload: CheckpointPayload, packed: Future[bytes]) -> None:
        """Copy a state in the background; `packed` is this worker's shard. The caller has waited for the one before."""
        self.step = payload.step
        written = self._thread.submit(self._write, payload, packed)  # which drops the shard's bytes
        self._copying = self._thread.submit(self._send, payload, written)

    @property
    def kept_step(self) -> int:
        """Step of the state that is being copied, once this worker has done its part; 0 otherwise."""
        is_done = self._copying and self._copying.done() and not self._copying.exception()
        return self.step if is_done else 0

    def advance(self, kept_step: int) -> None:
        """Remove the state before once all workers have kept the newest; `kept_step` is what they have agreed on."""
        if self._copying and kept_step == self.step:
            older, self._kept, self._copying = self._kept, self._copying.result(), None
            for folder in older:
                self._thread.submit(shutil.rmtree, folder, ignore_errors=True)

    def wait(self) -> None:
        """Wait until all workers have kept the newest state. Raises what this worker failed with."""
        if self._copying:
            self._group.wait_for_work(self._copying.result)
            self.advance(self.step)

    def discard(self) -> None:
        """Remove all copies: the run goes back, or has ended."""
        self.wait()
        while self._kept:
            shutil.rmtree(self._kept.pop(), ignore_errors=True)

    def close(self) -> None:
        self.discard()
        self._thread.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, payload: CheckpointPayload, packed: Future[bytes]) -> tuple[Path, FileEntry]:
        partial, rank = Path(tempfile.mkdtemp(dir=self._node_folder)), self._group.rank
        shard = write_packed(partial, shard_name(rank), packed.result())
        return self._complete(partial, Copy(rank=rank, shard=shard, payload=payload)), shard

    def _send(self, payload: CheckpointPayload, written: Future[tuple[Path, FileEntry]]) -> list[Path]:
        """Send the shard to the next node, and receive another of the node before. Return where this node has them."""
        own, shard = written.result()
        if not self._peers:
            return [own]
        sent, received = bytearray(json.dumps(asdict(shard)).encode().ljust(ENTRY_BYTES)), bytearray(ENTRY_BYTES)
        self._exchange(*(torch.frombuffer(each, dtype=torch.uint8) for each in (sent, received)))
        theirs, partial = FileEntry(**json.loads(received)), Path(tempfile.mkdtemp(dir=self._node_folder))
        with (partial / theirs.path).open("wb") as file:  # a write to a map without its memory would end the process
            os.posix_fallocate(file.fileno(), 0, theirs.bytes)
        self._exchange(_map(own, shard), _map(partial, theirs))
        rank = (self._group.rank - self._local_size) % self._group.world_size
        return [own, self._complete(partial, Copy(rank=rank, shard=theirs, payload=payload))]

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        """Send to the worker of this local rank on the next node, and receive from that on the node before."""
        size, rank = self._group.world_size, self._group.rank
        with naming_lost_workers():
            work = dist.isend(sent, (rank + self._local_size) % size, group=self._peers)
            dist.recv(received, (rank - self._local_size) % size, group=self._peers)
            assert work
            work.wait()

    def _complete(self, partial: Path, copy: Copy) -> Path:
        (partial / "copy.json").write_text(copy.model_dump_json(), encoding="utf-8")
        return partial.rename(self._node_folder / f"{copy.payload.step:08d}-{copy.rank:05d}")

    def _commit_newest(self, writer: CheckpointWriter) -> None:
        rank, committed = self._group.rank, self._group.tell(lambda: newest_step(self._job.checkpoint_collection) or 0)
        found, holders = self._find_copies(committed), defaultdict[ShardOrigin, dict[int, int]](dict)
        for worker, held in enumerate(self._group.gather({state: list(copies) for state, copies in found.items()})):
            for state, ranks in held.items():
                holders[state] = dict.fromkeys(ranks, worker) | holders[state]
        complete = [state for state, ranks in holders.items() if len(ranks) == state.num_workers]
        if not complete:
            return
        newest = max(complete, key=lambda state: state.step)
        own = {shard: found[newest][shard] for shard, worker in holders[newest].items() if worker == rank}
        payloads = self._group.gather(_read_copy(own[0]).payload if 0 in own else None)
        shards = {shard: (folder / shard_name(shard)).read_bytes for shard, folder in own.items()}
        writer.commit_shards(next(filter(None, payloads)), shards)
        if rank == 0:
            record_event(self._job, "recovered", step=newest.step, committed_step=committed)

    def _find_copies(self, committed_step: int) -> dict[ShardOrigin, dict[int, Path]]:
        """Return this worker's share of the node's intact copies of later steps, by state and rank."""
        found = defaultdict[ShardOrigin, dict[int, Path]](dict)
        for folder in sorted(self._folder.glob("node-*/[0-9]*"))[self._local_rank :: self._local_size]:
            copy = _read_copy(folder)
            if copy.payload.step <= committed_step or copy.payload.program_fingerprint != self._job.program_fingerprint:
                continue
            if damages := list(find_damages(folder, [copy.shard], "full")):
                logger.warning("%s: this copy is left out: %s", folder, damages[0])
            else:
                found[copy.payload.origin(self._job.run, rank=0)][copy.rank] = folder
        return found


def _read_copy(folder: Path) -> Copy:
    return Copy.model_validate_json((folder / "copy.json").read_bytes())


def _remove_leftovers(job: Job) -> None:
    """Remove from this node's memory what is left of this run, and of runs whose commands have ended."""
    for folder in MEMORY.glob("millrace-*"):
        with suppress(OSError):  # another user's, or removed meanwhile
            lock = (folder / "lock").readlink()
            if lock == job.lock.absolute() or find_holder(lock) is None:
                shutil.rmtree(folder)


def _map(folder: Path, shard: FileEntry) -> Tensor:
    return torch.from_file(str(folder / shard.path), shared=True, size=shard.bytes, dtype=torch.uint8)
