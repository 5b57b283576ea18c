"""The process group of all workers on their hosts, over gloo whatever their devices are.

Where a device's collectives have to form the first group of all, that is torch's group WORLD, and the hosts' group is
formed beside it. Everywhere else WORLD is the hosts' group.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist

from services.common.errors import WorkersLost
from services.common.program.mesh import COLLECTIVE_TIMEOUT

R = TypeVar("R")

GLOO = "gloo"
LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"
"""Variable that lets gloo connect two workers when a collective first needs that. Otherwise each worker connects to all
others at once, with as many sockets, and all read each other's addresses: 70 GB for 2,048 workers.
"""
POLL_SECONDS = 1.0
"""Seconds between two exchanges of workers that wait for others in `wait_for_work`."""


class ProcessGroup:
    """One worker's connection to all other workers of the run.

    All workers call every method, in the same order. Methods raise `WorkersLost` where another worker has ended.
    """

    def __init__(
        self, rank: int, world_size: int, host: dist.ProcessGroup | None = None, *, is_fake: bool = False
    ) -> None:
        """`host` is the group of the workers' hosts; None where it is torch's own group of all workers."""
        self.rank, self.world_size, self._host = rank, world_size, host
        self._is_alone = world_size == 1 or is_fake

    @classmethod
    def join(cls, rank: int, world_size: int, rendezvous: str, world: str = GLOO) -> Self:
        """Form the group at the launcher's rendezvous: `tcp://HOST:PORT/START`, where a store listens that other starts
        of the workers use too, or the path of a file on a shared disk.

        `world` is the torch.distributed backend of torch's own group of all workers.
        """
        if world_size == 1:
            return cls(rank, world_size)
        os.environ.setdefault(LAZY_CONNECTIONS, "1")
        with naming_lost_workers():
            store = _open_store(rendezvous, world_size)
            dist.init_process_group(world, timeout=COLLECTIVE_TIMEOUT, world_size=world_size, rank=rank, store=store)
            host = None if world == GLOO else dist.new_group(timeout=COLLECTIVE_TIMEOUT, backend=GLOO)
        group = cls(rank, world_size, host)
        with connecting():
            group.barrier()
            group.gather(None)
            group._broadcast(None)
        return group

    @classmethod
    def fake(cls, world_size: int, rank: int = 0, device: str = "cpu") -> Self:
        """Form a group whose other ranks do not exist, to trace graphs: shapes are right, values are meaningless.

        `device` is torch's name of the device whose tensors the collectives get, besides those of the CPU.
        """
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - a test module that is slow to import

        if world_size > 1:
            backend = ",".join(f"{each}:fake" for each in {"cpu": None, device: None})
            dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
        return cls(rank, world_size, is_fake=True)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def maximum(self, value: int) -> int:
        """Return the largest of the workers' integers on every worker, so that all decide alike."""
        return int(self.start_maximum([value])()[0])

    def start_maximum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Start to find the largest of the workers' numbers at each place, and return the function that waits for them.

        Workers give equally many numbers, none of them NaN, which gloo may pass over.
        """
        largest = torch.tensor(numbers, dtype=torch.float64)
        if self._is_alone:
            return largest.tolist
        with naming_lost_workers():
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host, async_op=True)
        assert work is not None, "this process is not in the group"

        def finish() -> list[float]:
            with naming_lost_workers():
                work.wait()
            return largest.tolist()

        return finish

    def barrier(self) -> None:
        """Return once every worker has called this."""
        self.maximum(0)

    def gather(self, item: R) -> list[R]:
        """Return every worker's item, a picklable object, in the order of their ranks, on every worker."""
        items = [item] * self.world_size
        if not self._is_alone:
            with naming_lost_workers():
                dist.all_gather_object(items, item, group=self._host)
        return items

    def tell(self, work: Callable[[], R]) -> R:
        """Run `work` on rank 0 alone while the others wait, and return its result, a picklable object, on every worker.

        An error of `work` is raised on rank 0, and ends the group.
        """
        return self._broadcast(self.wait_for_work(work if self.rank == 0 else lambda: cast("R", None)))

    def wait_for_work(self, work: Callable[[], R]) -> R:
        """Run `work`, which may take hours on some workers, and return its result once all have finished theirs.

        Waiting workers exchange a message every POLL_SECONDS: otherwise work that takes longer than a collective's
        timeout would end the group, and each of its restarts again. `work` runs in a thread of its own. What it raises
        is raised here, and ends the group as any worker's error does.
        """
        if self.world_size == 1:
            return work()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="work")
        future = thread.submit(work)
        thread.shutdown(wait=False)  # a worker that loses its peers must not wait for its own work
        while self.maximum(not future.done()):
            wait([future], POLL_SECONDS)
            if future.done():
                future.result()
        return future.result()

    def _broadcast(self, item: R) -> R:
        """Return rank 0's item on every worker."""
        items = [item]
        if not self._is_alone:
            with naming_lost_workers():
                dist.broadcast_object_list(items, src=0, group=self._host)
        return items[0]


def _open_store(rendezvous: str, world_size: int) -> Any:
    """Open the store of `ProcessGroup.join`. A start of its own: it would find the addresses of lost workers."""
    if not rendezvous.startswith("tcp://"):
        return dist.FileStore(rendezvous, world_size)  # type: ignore[attr-defined]
    place, _, start = rendezvous.removeprefix("tcp://").partition("/")
    host, _, port = place.rpartition(":")
    client = dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=COLLECTIVE_TIMEOUT)  # type: ignore[attr-defined]
    return dist.PrefixStore(start, client)  # type: ignore[attr-defined]


@contextmanager
def connecting() -> Iterator[None]:
    """Run the first collectives of a group in the block, which connect the workers that later ones of their kind need.

    Later ones keep their timeouts. The first ones do not: gloo waits without a limit for a connection to a worker that
    is frozen in this moment (gloo's issue 520; torch 2.13). So this ends the process after COLLECTIVE_TIMEOUT.
    """
    faulthandler.dump_traceback_later(COLLECTIVE_TIMEOUT.total_seconds(), exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def naming_lost_workers(is_every_error: bool = True) -> Iterator[None]:
    """Raise `WorkersLost` in place of the error of a collective.

    Not `is_every_error`: only in place of a collective's, where the block is a compiled graph or a forward and backward
    pass. Their other errors are `RuntimeError` too, such as running out of memory, and pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors have no type of their own, but their text begins with the path of the source that raised them.
        if is_every_error or isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise WorkersLost(f"a collective failed, most likely because another worker died: {error}") from error
        raise
