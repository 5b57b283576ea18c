"""Plain PyTorch: a device, a process group and Inductor. `cpu` with `gloo` today."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.errors import WorkersLost
from services.common.program.reduction import sum_over_ranks

if TYPE_CHECKING:
    from services.common.program.backends.inductor import Inductor

R = TypeVar("R")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # longer than the slowest compilation that a peer may be busy with
POLL_SECONDS = 1.0


class TorchNative:
    """One worker's device and its connection to the others."""

    def __init__(self, threads: int, device: str = "cpu", group: str = "gloo") -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        # A debugging aid that comes with determinism and writes every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = device
        self._group = group
        self.rank, self.world_size = 0, 1

    def join(self, rank: int, world_size: int) -> None:
        """Form the process group where the launcher says: at `tcp://HOST:PORT`, or in a file that all workers see."""
        if world_size > 1:
            meeting_point = os.environ["MILLRACE_RENDEZVOUS"]
            # No file:// URL, in which characters of a path mean something else.
            place: dict[str, Any] = (
                {"init_method": meeting_point}
                if meeting_point.startswith("tcp://")
                else {"store": dist.FileStore(meeting_point, world_size)}  # type: ignore[attr-defined]
            )
            try:
                dist.init_process_group(
                    self._group, timeout=COLLECTIVE_TIMEOUT, world_size=world_size, rank=rank, **place
                )
            except RuntimeError as error:
                _raise_peer_lost(error)
        self.rank, self.world_size = rank, world_size

    def join_fake(self, world_size: int) -> None:
        """Be rank 0 of a group whose other ranks do not exist: right shapes, meaningless values. For tracing."""
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - test module, slow import

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        self.rank, self.world_size = 0, world_size

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum_over_workers(self, value: Tensor, reduction: str) -> Tensor:
        """Sum over all workers, the same bits on each; `exact`: also the same bits for every number of workers."""
        if self.world_size == 1:
            return value
        try:
            if reduction == "exact":
                return sum_over_ranks(value, self.rank, self.world_size, self._exchange)
            dist.all_reduce(value)
        except RuntimeError as error:
            _raise_peer_lost(error)
        return value

    def maximum_over_workers(self, value: int) -> int:
        """The largest of the workers' integers, on every worker: how they all decide the same thing."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        except RuntimeError as error:
            _raise_peer_lost(error)
        return int(tensor.item())

    def gather_over_workers(self, value: Tensor) -> list[Tensor]:
        """The workers' values, of one shape and type, in the order of their ranks, on every worker."""
        if self.world_size == 1:
            return [value]
        values = [torch.empty_like(value) for _ in range(self.world_size)]
        try:
            dist.all_gather(values, value)
        except RuntimeError as error:
            _raise_peer_lost(error)
        return values

    def gather_facts(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """What each worker says of itself, in the order of their ranks, on every worker."""
        if self.world_size == 1:
            return [facts]
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, facts)
        except RuntimeError as error:
            _raise_peer_lost(error)
        return gathered

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
        while self.maximum_over_workers(not future.done()):
            wait([future], POLL_SECONDS)
            if future.done():
                future.result()
        return future.result()

    def wait_for_all(self) -> None:
        """Return once every worker has come here."""
        self.maximum_over_workers(0)

    def autocast(self, dtype: str) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16, enabled=dtype == "bfloat16")

    def compile(self, function: Callable[..., R]) -> Callable[..., R]:
        """Compile a function for static shapes. It raises `DeviceError` on a cold cache after `require_warm_cache`."""
        return self._inductor.compile(function)

    def require_warm_cache(self) -> None:
        """From now on, refuse to compile a graph that the cache directory does not hold."""
        self._inductor.witness.is_forbidden = True

    @property
    def graphs_compiled(self) -> int:
        """Graphs that this process compiled because the cache did not hold them."""
        return self._inductor.witness.graphs_compiled if "_inductor" in self.__dict__ else 0

    @cached_property
    def _inductor(self) -> Inductor:
        from services.common.program.backends.inductor import Inductor  # noqa: PLC0415 - 3 s that eager runs save

        return Inductor()

    def _exchange(self, value: Tensor, peer: int) -> Tensor:
        received = torch.empty_like(value)
        sending = dist.P2POp(dist.isend, value, peer)
        receiving = dist.P2POp(dist.irecv, received, peer)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        return received


def _raise_peer_lost(error: RuntimeError) -> NoReturn:
    raise WorkersLost(f"a collective failed, most likely because another worker died: {error}") from error
