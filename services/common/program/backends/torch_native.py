"""The backend of plain PyTorch: a device of `native_device`, process groups along the axes, and Inductor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.program.backends.backend import Backend
from services.common.program.backends.environment_facts import require_compilation
from services.common.program.backends.inductor_facts import CACHE_VARIABLE, TRITON_CACHE_VARIABLE, inductor_facts
from services.common.program.backends.native_device import (
    NATIVE_DEVICES,
    device_facts,
    open_device,
    require_device,
)
from services.common.program.backends.neuron_facts import cache_variables, trace_variables
from services.common.program.mesh import AXES, COLLECTIVE_TIMEOUT, Axis, Mesh, make_mesh
from services.common.program.process_group import GLOO, connecting, naming_lost_workers
from services.common.program.reduction import RunningSum, Sum, TreeSum, sum_in_tree
from services.common.program.snapshot import CudaSnapshots, Snapshots
from services.common.recipe.schema import Device, Recipe

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

    from services.common.program.backends.inductor import Inductor
    from services.common.program.backends.neuron_compiler import NeuronCompiler

R = TypeVar("R")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt, from glibc's malloc.h."""
PIECE_ELEMENTS = 2**22
"""Elements that an exact sum takes at a time. In one piece, an exact sum of 100 MB over four workers takes 1.8 times as
long as a fast one, because the memory between its two exchanges is new each time. In pieces it takes 1.2 to 1.5 times
as long.
"""
FAKE = "fake"
"""Name of the torch.distributed backend whose group consists of this process alone, whatever its size."""
OPS = torch.ops._c10d_functional
"""Functional collectives, the form that a compiled graph can contain."""
GROUP_NAMES: dict[Axis, str] = {axis: f"millrace-{axis}" for axis in AXES}
"""Names of the process groups, by axis; compiled graphs contain them."""


class TorchNative(Backend):
    """`Backend` on a CPU, a CUDA GPU, or a NeuronCore by TorchNeuron: operations run as they are called."""

    rounds_weights = True

    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "cpu", local_rank: int = 0) -> None:
        torch.set_num_threads(threads)
        # Large pages for large tensors: a sum of 100 MB over four workers takes half the time, a train step 2 % less.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it when it allocates the first large tensor
        if device == "cpu":
            keep_freed_memory()
        # This does what use_deterministic_algorithms(True) does, without importing Inductor: 2.2 s of CPU.
        torch.set_deterministic_debug_mode("error")
        # Deterministic mode would write every new tensor twice, as a debugging aid.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.mesh, self.device = mesh, open_device(device, local_rank)
        self._native, self._reduction = NATIVE_DEVICES[device], reduction
        self.runs_eagerly = self._native.runs_eagerly
        self._groups = {axis: _form_group(mesh, axis, self._native.collectives) for axis in AXES}
        for axis in AXES:
            self._connect(axis)
        self._indices = {axis: torch.tensor([mesh.index(axis)], dtype=torch.int32).to(self.device) for axis in AXES}

    @staticmethod
    def facts(recipe: Recipe) -> dict[str, Any]:
        if recipe.compile.enabled:
            require_compilation(os.environ)
        is_of_inductor = NATIVE_DEVICES[recipe.parallel.device].compiler == "inductor"
        # With another compiler the host's CPU decides neither bits nor graphs.
        return device_facts(recipe) | (inductor_facts(recipe.compile.enabled) if is_of_inductor else {})

    @staticmethod
    def world_collectives(device: Device) -> str:
        if not NATIVE_DEVICES[device].forms_world:
            return GLOO
        require_device(device)
        return NATIVE_DEVICES[device].collectives

    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        if NATIVE_DEVICES[recipe.parallel.device].compiler == "neuron":
            return cache_variables(folder, recipe)
        is_on_gpu = recipe.parallel.device == "cuda"
        return {CACHE_VARIABLE: str(folder)} | ({TRITON_CACHE_VARIABLE: str(folder / "triton")} if is_on_gpu else {})

    @staticmethod
    def trace_environment(recipe: Recipe) -> dict[str, str]:
        return trace_variables(recipe) if NATIVE_DEVICES[recipe.parallel.device].compiler == "neuron" else {}

    @staticmethod
    def ranks_to_trace(recipe: Recipe) -> tuple[int, ...]:
        parallel = recipe.parallel
        if NATIVE_DEVICES[parallel.device].compiler == "inductor" or parallel.tensor_parallel_size == 1:
            return (0,)  # collectives of Inductor's graphs name the axis alone, where others may list ranks
        # The compiled functions of the program have collectives along the tensor axis alone.
        return tuple(group[0] for group in make_mesh(recipe, 0, parallel.num_workers).groups("tensor"))

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
        gathered = self.start_all_gather(x, axis)()
        return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)

    def start_all_gather(self, x: Tensor, axis: Axis) -> Callable[[], Tensor]:
        size = self.mesh.size(axis)
        if size == 1:
            return lambda: x
        return _start(OPS.all_gather_into_tensor, x.contiguous(), size, self._groups[axis])

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        return self.start_reduce_scatter(x if dim == 0 else torch.cat(x.chunk(size, dim)), axis)()

    def start_reduce_scatter(self, x: Tensor, axis: Axis) -> Callable[[], Tensor]:
        size, slices = self.mesh.size(axis), x.contiguous()  # one for each rank
        if size == 1:
            return lambda: x
        if self._reduction != "exact":
            return _start(OPS.reduce_scatter_tensor, slices, "sum", size, self._groups[axis])
        if not self._native.has_all_to_all:
            return partial(self._sum_gathered, slices, axis, size)
        # Each rank sends as many bytes as in a ring. Gathering all slices everywhere would send `size` times more.
        lengths = [len(slices) // size] * size
        exchanged = _start(OPS.all_to_all_single, slices, lengths, lengths, self._groups[axis])
        return lambda: sum_in_tree(exchanged().chunk(size))

    def _sum_gathered(self, slices: Tensor, axis: Axis, size: int) -> Tensor:
        """Return this rank's slice of the sum in the tree, from all ranks' slices: `size` times the bytes of a ring."""
        gathered = _run(OPS.all_gather_into_tensor, slices, size, self._groups[axis])
        by_rank = gathered.unflatten(0, (size, size, len(slices) // size))
        return sum_in_tree(by_rank.index_select(1, self.index(axis)).squeeze(1).unbind(0))

    def _connect(self, axis: Axis) -> None:
        """Run each kind of collective along the axis once, where gloo would connect workers in the middle of a step."""
        size = self.mesh.size(axis)
        if size == 1 or self._native.collectives != GLOO or FAKE in dist.get_backend():
            return
        with connecting(), naming_lost_workers():
            x = torch.zeros(size)
            for op in ("sum", "max"):
                self.all_reduce(x, axis, op)
            self.all_gather(self.reduce_scatter(x, axis), axis)

    def _sum_exactly(self, x: Tensor, axis: Axis, size: int) -> Tensor:
        """Return the sum in the tree: each rank sums one slice, then all gather. It sends as many bytes as a ring."""
        flat = x.flatten()
        if flat.numel() % size:  # scalars and the like
            return sum_in_tree(self.all_gather(flat, axis).chunk(size)).view_as(x)
        length = PIECE_ELEMENTS // size * size
        if flat.numel() <= length:
            return self.all_gather(self.reduce_scatter(flat, axis), axis).view_as(x)
        total = torch.empty_like(flat)
        for sums, piece in zip(total.split(length), flat.split(length), strict=True):
            sums.copy_(self.all_gather(self.reduce_scatter(piece, axis), axis))
        return total.view_as(x)

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        if self.device.type == "cuda" and mask_B1SS is not None:
            # With a mask, torch's only CUDA kernel for grouped queries keeps the scores [B, H, S, S] in memory.
            copies = q_BHSN.shape[1] // k_BKSN.shape[1]
            k_BKSN, v_BKSN = (each.repeat_interleave(copies, dim=1) for each in (k_BKSN, v_BKSN))
        return super().attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)

    def make_sum(self, size: int, in_tree: bool) -> Sum:
        return TreeSum() if in_tree else RunningSum()

    def make_snapshots(self) -> Snapshots:
        return CudaSnapshots(self.device) if self.device.type == "cuda" else Snapshots()

    def has_fused_adamw(self, is_compiled: bool) -> bool:
        return self._native.fused_adamw == "always" or (self._native.fused_adamw == "eager" and not is_compiled)

    def send(self, x: Tensor) -> Tensor:
        # From pageable memory a GPU copies only after all earlier work, and the host waits for that: it would launch
        # the next micro-batch's kernels late.
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        return self._compiler.compile(function, is_dynamic)

    def require_warm_cache(self) -> None:
        self._compiler.forbid_compilation()

    def graphs_compiled(self) -> int:
        return self._compiler.graphs_compiled if "_compiler" in self.__dict__ else 0

    @cached_property
    def _compiler(self) -> Inductor | NeuronCompiler:
        if self._native.compiler == "neuron":
            from services.common.program.backends.neuron_compiler import NeuronCompiler  # noqa: PLC0415

            return NeuronCompiler()
        from services.common.program.backends.inductor import Inductor  # noqa: PLC0415 - the import takes 3 s, which eager runs save

        return Inductor()


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed tensors.

    By default glibc returns freed memory of more than 32 MB to the system, which clears it page by page when it is
    allocated again: that takes half the time of a small model's eager step, and a fifth of a compiled step's.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have no such switch
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _form_group(mesh: Mesh, axis: Axis, collectives: str) -> str:
    """Form the process groups along the axis and return the name of this rank's own; empty where it has one rank.

    A compiled graph contains the name. Torch numbers all groups, so ranks of different groups would compile different
    graphs: here every rank calls its own group by the name of the axis.
    """
    if mesh.size(axis) == 1:
        return ""
    is_like_world = dist.get_backend() == collectives or FAKE in dist.get_backend()
    if mesh.size(axis) == mesh.world_size and is_like_world:
        group = dist.group.WORLD
    else:
        backend = dist.get_backend() if is_like_world else collectives
        with naming_lost_workers():
            # Every worker has to form all groups, also those that it does not belong to.
            formed = [dist.new_group(ranks, COLLECTIVE_TIMEOUT, backend) for ranks in mesh.groups(axis)]
        group = formed[mesh.groups(axis).index(mesh.group(axis))]
    assert group
    name = cast("GroupName", GROUP_NAMES[axis])
    c10d = torch._C._distributed_c10d
    c10d._unregister_process_group(name)  # one that an earlier backend of this process registered
    c10d._register_process_group(name, group)
    return name


def _run(collective: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a collective and return its result. Raises `WorkersLost`, also where the collective cannot begin."""
    return _start(collective, *arguments)()


def _start(collective: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    """Start a collective, and return the function that waits for its result. Both raise `WorkersLost`."""
    with naming_lost_workers():
        coming = collective(*arguments)

    def finish() -> Tensor:
        with naming_lost_workers():
            result: Tensor = OPS.wait_tensor(coming)
        return result

    return finish
