"""Plain PyTorch: a device, process groups and Inductor. See `native_device` for the devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.program.attention import attend
from services.common.program.backends.inductor_facts import CACHE_VARIABLE, TRITON_CACHE_VARIABLE, inductor_facts
from services.common.program.backends.native_device import NATIVE_DEVICES, device_facts, open_device
from services.common.program.backends.protocol import CacheReport
from services.common.program.mesh import AXES, Axis, Mesh
from services.common.program.reduction import sum_in_tree
from services.common.program.worker_group import COLLECTIVE_TIMEOUT, naming_lost_workers
from services.common.recipe import Device, Recipe

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

    from services.common.program.backends.inductor import Inductor

R = TypeVar("R")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
PIECE_ELEMENTS = 2**22
"""Of an exact sum at a time. In one piece a sum of 100 MB by four workers takes 1.8 times as long as a fast one: the
memory between its two exchanges is never the same. In pieces it takes 1.2 to 1.5 times as long.
"""
FAKE = "fake"  # of a group that stands for others, which has no device's collectives
OPS = torch.ops._c10d_functional  # the form of collectives that a graph can hold
GROUP_NAMES: dict[Axis, str] = {axis: f"millrace-{axis}" for axis in AXES}


class TorchNative:
    """See `Backend`. No call has to be told that a graph ends, and a read waits by itself."""

    is_lazy = False
    host = torch.device("cpu")

    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "cpu", local_rank: int = 0) -> None:
        torch.set_num_threads(threads)
        # Large tensors on large pages: a sum of 100 MB by four workers takes half the time, a train step 2 % less.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # which torch reads when it allocates the first of them
        if device == "cpu":
            keep_freed_memory()
        # What use_deterministic_algorithms(True) does, without its import of Inductor: 2.2 s of CPU.
        torch.set_deterministic_debug_mode("error")
        # A debugging aid that comes with determinism and writes every new tensor twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.mesh, self.device = mesh, open_device(device, local_rank)
        self._reduction = reduction
        self._groups = {axis: _form_group(mesh, axis, NATIVE_DEVICES[device].collectives) for axis in AXES}
        self._indices = {axis: torch.tensor([mesh.index(axis)], dtype=torch.int32).to(self.device) for axis in AXES}

    @staticmethod
    def facts(recipe: Recipe) -> dict[str, Any]:
        is_compiled = recipe.compile.enabled
        return device_facts(recipe.parallel.device, is_compiled) | inductor_facts(is_compiled)

    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        is_on_gpu = recipe.parallel.device == "cuda"
        return {CACHE_VARIABLE: str(folder)} | ({TRITON_CACHE_VARIABLE: str(folder / "triton")} if is_on_gpu else {})

    def index(self, axis: Axis) -> Tensor:
        return self._indices[axis]

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        if op == "sum" and self._reduction == "exact":
            return self._sum_exactly(x, axis, size)
        return _run(OPS.all_reduce, x, op, self._groups[axis])

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        gathered = _run(OPS.all_gather_into_tensor, x.contiguous(), size, self._groups[axis])
        return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        slices = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))  # one for each worker
        if self._reduction == "exact":
            # A ring's bytes, where summing everything everywhere would take size times as many.
            lengths = [len(slices) // size] * size
            return sum_in_tree(_run(OPS.all_to_all_single, slices, lengths, lengths, self._groups[axis]).chunk(size))
        return _run(OPS.reduce_scatter_tensor, slices, "sum", size, self._groups[axis])

    def _sum_exactly(self, x: Tensor, axis: Axis, size: int) -> Tensor:
        """The tree's sum, for a ring's bytes: each worker sums a slice, and all gather them."""
        flat = x.flatten()
        if flat.numel() % size:  # a few numbers
            return sum_in_tree(self.all_gather(flat, axis).chunk(size)).view_as(x)
        length = PIECE_ELEMENTS // size * size
        if flat.numel() <= length:
            return self.all_gather(self.reduce_scatter(flat, axis), axis).view_as(x)
        total = torch.empty_like(flat)
        for sums, piece in zip(total.split(length), flat.split(length), strict=True):
            sums.copy_(self.all_gather(self.reduce_scatter(piece, axis), axis))
        return total.view_as(x)

    def fence(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        if self.device.type == "cuda" and mask_B1SS is not None:
            # With a mask, torch's only kernel for CUDA that shares key-value heads keeps all of [B, H, S, S].
            copies = q_BHSN.shape[1] // k_BKSN.shape[1]
            k_BKSN, v_BKSN = (each.repeat_interleave(copies, dim=1) for each in (k_BKSN, v_BKSN))
        return attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)

    def place(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def to_host(self, x: Tensor) -> Tensor:
        return x.cpu()

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


def keep_freed_memory() -> None:
    """Let this process reuse the memory of tensors that are gone. By default glibc gives what is larger than 32 MB back
    to the system, which clears it again page by page: half the time of a small model's eager step, and a fifth of a
    compiled one's.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have no such switch
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _form_group(mesh: Mesh, axis: Axis, collectives: str) -> str:
    """The name of this worker's process group along the axis; nothing where it is alone.

    A compiled graph holds the name. Torch numbers all groups, so workers of different groups would compile different
    graphs: each worker calls its own group by the axis.
    """
    if mesh.size(axis) == 1:
        return ""
    is_like_world = dist.get_backend() in (collectives, FAKE)
    if mesh.size(axis) == mesh.world_size and is_like_world:
        group = dist.group.WORLD
    else:
        backend = None if is_like_world else collectives
        with naming_lost_workers():
            # Every worker has to form all of them.
            formed = [dist.new_group(ranks, COLLECTIVE_TIMEOUT, backend) for ranks in mesh.groups(axis)]
        group = formed[mesh.groups(axis).index(mesh.group(axis))]
    assert group
    name = cast("GroupName", GROUP_NAMES[axis])
    c10d = torch._C._distributed_c10d
    c10d._unregister_process_group(name)  # of another backend that was made in this process
    c10d._register_process_group(name, group)
    return name


def _run(collective: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Its result, once it is there. Raises `WorkersLost`, also when the collective cannot begin."""
    with naming_lost_workers():
        result: Tensor = OPS.wait_tensor(collective(*arguments))
    return result
