"""Plain PyTorch: a device, process groups and Inductor. `cpu` with `gloo` today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.program.backends.inductor_facts import CACHE_VARIABLE, inductor_facts
from services.common.program.backends.protocol import CacheReport
from services.common.program.mesh import AXES, Axis, Mesh
from services.common.program.reduction import sum_in_tree
from services.common.program.worker_group import naming_lost_workers

if TYPE_CHECKING:
    from services.common.program.backends.inductor import Inductor

R = TypeVar("R")

DEVICE = torch.device("cpu")


class TorchNative:
    """See `Backend`. Each call runs at once, so that no graph has to be ended and no read has to wait."""

    def __init__(self, mesh: Mesh, threads: int, reduction: str) -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        # A debugging aid that comes with determinism and writes every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.mesh, self.device = mesh, DEVICE
        self._reduction = reduction
        self._groups = {axis: _form_group(mesh, axis) for axis in AXES}
        self._indices = {axis: torch.tensor([mesh.index(axis)], dtype=torch.int32, device=DEVICE) for axis in AXES}

    @staticmethod
    def facts(is_compiled: bool) -> dict[str, Any]:
        return inductor_facts(is_compiled)

    @staticmethod
    def cache_environment(folder: Path) -> dict[str, str]:
        return {CACHE_VARIABLE: str(folder)}

    def index(self, axis: Axis) -> Tensor:
        return self._indices[axis]

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        if op == "sum" and self._reduction == "exact":
            return self._sum_exactly(x, axis, size)
        result = x.clone()
        with naming_lost_workers():
            dist.all_reduce(result, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self._groups[axis])
        return result

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        if self.mesh.size(axis) == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.mesh.size(axis))]
        with naming_lost_workers():
            dist.all_gather(parts, x.contiguous(), group=self._groups[axis])
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        slices = torch.stack(x.chunk(size, dim))  # one for each worker
        with naming_lost_workers():
            if self._reduction == "exact":
                # A ring's bytes, where summing everything everywhere would take size times as many.
                received = torch.empty_like(slices)
                dist.all_to_all_single(received, slices, group=self._groups[axis])
                return sum_in_tree(received)
            result = torch.empty_like(slices[0])
            dist.reduce_scatter_tensor(result, slices.flatten(0, 1), group=self._groups[axis])
        return result

    def _sum_exactly(self, x: Tensor, axis: Axis, size: int) -> Tensor:
        """The tree's sum, for a ring's bytes: each worker sums a slice, and all gather them."""
        flat = x.flatten()
        if flat.numel() % size:  # a few numbers
            return sum_in_tree(self.all_gather(flat, axis).view(size, -1)).view_as(x)
        return self.all_gather(self.reduce_scatter(flat, axis), axis).view_as(x)

    def fence(self, x: Tensor) -> Tensor:
        return x

    def end_graph(self) -> None:
        pass

    def defer(self, values: Mapping[str, Tensor]) -> Computed:
        return Computed(values)

    def autocast(self, dtype: str) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def compile(self, function: Callable[..., R]) -> Callable[..., R]:
        return self._inductor.compile(function)

    def compile_elementwise(self, function: Callable[..., R]) -> Callable[..., R]:
        return self._inductor.compile(function, is_dynamic=True)

    def require_warm_cache(self) -> None:
        self._inductor.counter.is_forbidden = True

    def cache_report(self) -> CacheReport:
        return CacheReport(self._inductor.counter.graphs_compiled if "_inductor" in self.__dict__ else 0)

    @cached_property
    def _inductor(self) -> Inductor:
        from services.common.program.backends.inductor import Inductor  # noqa: PLC0415 - 3 s that eager runs save

        return Inductor()


class Computed:
    """Values that are there as soon as they can be asked for."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def read(self) -> dict[str, float]:
        return {name: value.item() for name, value in self._values.items()}


def _form_group(mesh: Mesh, axis: Axis) -> dist.ProcessGroup | None:
    """This worker's process group along the axis; None for all workers together, and for one alone."""
    if mesh.size(axis) in (1, mesh.world_size):
        return None
    with naming_lost_workers():
        formed = [dist.new_group(ranks) for ranks in mesh.groups(axis)]  # every worker has to form all of them
    return formed[mesh.groups(axis).index(mesh.group(axis))]
