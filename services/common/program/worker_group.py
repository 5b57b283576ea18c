"""The workers of a run as processes: what they tell each other on the host, whatever their devices are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from services.common.errors import WorkersLost

R = TypeVar("R")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # longer than the slowest compilation that a peer may be busy with
POLL_SECONDS = 1.0


class WorkerGroup:
    """One worker's connection to the others. Every method is called by all of them, in the same order.

    All raise `WorkersLost` when another worker has ended.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    @classmethod
    def join(cls, rank: int, world_size: int, rendezvous: str) -> Self:
        """Meet the others where the launcher says: at `tcp://HOST:PORT`, or in a file that all of them see."""
        if world_size > 1:
            # No file:// URL, in which characters of a path mean something else.
            place: dict[str, Any] = (
                {"init_method": rendezvous}
                if rendezvous.startswith("tcp://")
                else {"store": dist.FileStore(rendezvous, world_size)}  # type: ignore[attr-defined]
            )
            with naming_lost_workers():
                dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT, world_size=world_size, rank=rank, **place)
        return cls(rank, world_size)

    @classmethod
    def fake(cls, world_size: int, rank: int = 0) -> Self:
        """A rank of a group whose other ranks do not exist: right shapes, meaningless values. For tracing."""
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - test module, slow import

        if world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return cls(rank, world_size)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def maximum(self, value: int) -> int:
        """The largest of the workers' integers, on every worker: how they all decide the same thing."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        with naming_lost_workers():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor.item())

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """As `gather`, of equally many numbers from each worker: cheap enough for every step."""
        if self.world_size == 1:
            return [list(numbers)]
        # A sum with zeros: gloo's all_gather takes up to twice as long.
        gathered = torch.zeros(self.world_size, len(numbers), dtype=torch.float64)
        gathered[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        with naming_lost_workers():
            dist.all_reduce(gathered)
        return [list(theirs) for theirs in gathered.tolist()]

    def limit_collectives(self, timeout: timedelta) -> None:
        """Let collectives that this worker begins from now on end after `timeout`, also those along the mesh's axes.

        Nothing is exchanged for it: a worker's timeout is its own.
        """
        c10d = dist.distributed_c10d
        for group in [each for each in c10d._world.pg_map if isinstance(each, dist.ProcessGroup)]:
            # Torch can set it for these; it warns for others and does nothing.
            if {device.type for device in group._device_types} & {"cpu", "cuda"}:
                c10d._set_pg_timeout(timeout, group)

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """What each worker says of itself, in the order of their ranks, on every worker."""
        if self.world_size == 1:
            return [facts]
        gathered: list[Any] = [None] * self.world_size
        with naming_lost_workers():
            dist.all_gather_object(gathered, facts)
        return gathered

    def barrier(self) -> None:
        """Return once every worker has come here."""
        self.maximum(0)

    def wait_for_work(self, work: Callable[[], R]) -> R:
        """Run `work`, which may take hours on some of the workers, and return once all of them have finished theirs.

        Workers that wait hear from the others every POLL_SECONDS: work that outlasts the collectives' timeout would
        else end the group, and each of its restarts again. `work` runs in a thread of its own; what it raises is raised
        here, and ends the group as any worker's error does.
        """
        if self.world_size == 1:
            return work()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")
        future = thread.submit(work)
        thread.shutdown(wait=False)  # takes no more work; a worker that loses its peers must not wait for its own
        while self.maximum(not future.done()):
            wait([future], POLL_SECONDS)
            if future.done():
                future.result()
        return future.result()


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Raise `WorkersLost` for what a collective raises."""
    try:
        yield
    except RuntimeError as error:
        raise _name_loss(error) from error


@contextmanager
def naming_workers_lost_in_graphs() -> Iterator[None]:
    """Raise `WorkersLost` for what the collectives in compiled graphs raise, in the forward and the backward pass.

    A graph raises `RuntimeError` for much else, which passes: memory that is out, an operation that is a bug.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no type of their own; they begin with the file of its source that raised them.
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise _name_loss(error) from error
        raise


def _name_loss(error: RuntimeError) -> WorkersLost:
    return WorkersLost(f"a collective failed, most likely because another worker died: {error}")
