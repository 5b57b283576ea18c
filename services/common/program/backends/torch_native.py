"""Plain PyTorch: a device, a process group and Inductor. `cpu` with `gloo` today."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from services.common.errors import DeviceError, WorkersLost
from services.common.program.reduction import sum_over_ranks

R = TypeVar("R")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # longer than the slowest compilation that a peer may be busy with


class TorchNative:
    """One worker's device and its connection to the others."""

    def __init__(self, threads: int, device: str = "cpu", group: str = "gloo") -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        # A debugging aid that comes with determinism and writes every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = device
        self.compile_witness = CompileWitness()
        self._group = group
        self.rank, self.world_size = 0, 1

    def join(self, rank: int, world_size: int) -> None:
        """Form the process group, unless the launcher has done so already."""
        if not dist.is_initialized():
            meeting_point = os.environ["MILLRACE_RENDEZVOUS"]
            dist.init_process_group(self._group, meeting_point, COLLECTIVE_TIMEOUT, world_size, rank)
        self.rank, self.world_size = rank, world_size

    def join_fake(self, world_size: int) -> None:
        """Be rank 0 of a group whose other ranks do not exist: right shapes, meaningless values. For tracing."""
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - test module, slow import

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        self.rank, self.world_size = 0, world_size

    def leave(self) -> None:
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

    def autocast(self, dtype: str) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16, enabled=dtype == "bfloat16")

    def compile(self, function: Callable[..., R]) -> Callable[..., R]:
        """Compile for static shapes. Every graph that Inductor really compiles is counted by `compile_witness`.

        The result raises `DeviceError` when compiling is forbidden and a graph is not in the cache.
        """
        torch._inductor.config.post_grad_custom_pre_pass = self.compile_witness
        compiled = torch.compile(function, dynamic=False, fullgraph=True)

        def call(*arguments: Any) -> R:
            try:
                return compiled(*arguments)
            except RuntimeError as error:  # Dynamo wraps what a pass raises
                if self.compile_witness.refusal:
                    raise self.compile_witness.refusal from error
                raise

        return call

    def _exchange(self, value: Tensor, peer: int) -> Tensor:
        received = torch.empty_like(value)
        sending = dist.P2POp(dist.isend, value, peer)
        receiving = dist.P2POp(dist.irecv, received, peer)
        for request in dist.batch_isend_irecv([sending, receiving]):
            request.wait()
        return received


class CompileWitness(CustomGraphPass):
    """An Inductor pass that changes nothing and counts: it runs when a graph is compiled, not when it is found.

    Inductor's own counters also call "hit" a graph whose machine code it then builds anew. The pass has a fixed
    `uuid`, so it is part of every cache key in the same way in the compiler and in the trainer.
    """

    def __init__(self) -> None:
        self.graphs_compiled = 0
        self.is_forbidden = False
        self.refusal: DeviceError | None = None

    def __call__(self, graph: torch.fx.graph.Graph) -> None:
        self.graphs_compiled += 1
        if self.is_forbidden:
            self.refusal = DeviceError(
                "a graph is not in the compile cache and compile.require_warm is set. The cache was made for another "
                "step; run the compiler stage again, or set --compile.require_warm=false to compile here."
            )
            raise self.refusal

    def uuid(self) -> str:
        return "millrace-compile-witness"


def _raise_peer_lost(error: RuntimeError) -> NoReturn:
    raise WorkersLost(f"a collective failed, most likely because another worker died: {error}") from error
