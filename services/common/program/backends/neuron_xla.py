"""Trainium by torch_xla: the device of trn1, whose graphs neuronx-cc compiles.

Nothing is computed when it is asked for. What was asked for up to `end_graph` is a graph, which the device runs; the
first time it is compiled, which takes up to an hour, so a run has few graphs and every worker the same. Tracing alone
needs no Neuron package: torch_xla makes the graphs on a CPU too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from services.common.errors import DeviceError
from services.common.program.attention import attend
from services.common.program.backends.compiler_shim import CompilerShim, forbid_compiler
from services.common.program.backends.protocol import CacheReport
from services.common.program.mesh import AXES, Axis, Mesh
from services.common.recipe import Device

R = TypeVar("R")

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
PINNED_VARIABLES = {
    "XLA_IR_DEBUG": "0",  # these two write paths of source files into graphs
    "XLA_HLO_DEBUG": "0",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",  # another hash, and a gap in convergence with ZeRO-1 where it is 1
    # A sum over one worker would not be in the graph; one process that traces for many is alone.
    "XLA_ALWAYS_ALLREDUCE": "1",
}
"""Read once, when torch_xla is imported. They change graphs, so they have one value."""
_GRAPH_VARIABLES = (
    "XLA_",
    "NEURON_CC_FLAGS",
    "NEURON_FUSE_",
    "NEURON_CUSTOM_",
    "NEURON_LOGICAL_NC_",
    "NEURON_RT_STOCH",
)
DISTRIBUTIONS = ("torch_xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "neuronx_distributed", "nki")
FLASH_ATTENTION_MULTIPLE = 2048
"""Positions of a sequence: NxD's kernel takes multiples of it (kernels/flash_attn.py of neuronx-distributed 0.18)."""


class NeuronXla:
    """See `Backend`."""

    is_lazy = True
    has_groups_in_graphs = True
    host = torch.device("cpu")

    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "xla", local_rank: int = 0) -> None:
        if reduction != "fast":
            raise ValueError(f"the sums of {reduction!r} are another graph for each micro-batch of a step")
        torch.set_num_threads(threads)
        self._xla = import_torch_xla()
        self._xm = self._xla.core.xla_model
        # The engine's own thread for the device would still hold gradients when the graph ends: outputs that nobody
        # reads, other ones each time.
        torch.autograd.set_multithreading_enabled(False)
        self.mesh, self.device = mesh, self._xla.device()
        self._groups = {axis: mesh.groups(axis) for axis in AXES}
        self._indices = {axis: self.place(torch.tensor([mesh.index(axis)], dtype=torch.int32)) for axis in AXES}
        self._num_modules = _count_modules()
        self._shim: CompilerShim | None = None

    @staticmethod
    def facts(is_compiled: bool, device: Device = "xla") -> dict[str, Any]:
        require_pinned(os.environ)
        return {
            "libraries": {name: _version_of(name) for name in DISTRIBUTIONS},
            "environment": {
                **PINNED_VARIABLES,
                **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_GRAPH_VARIABLES)},
            },
        }

    @staticmethod
    def cache_environment(folder: Path) -> dict[str, str]:
        return {CACHE_VARIABLE: str(folder)}

    def index(self, axis: Axis) -> Tensor:
        return self._indices[axis]

    # `pin_layout` would make an all-gather and a reduce-scatter of all-reduces.

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        if self.mesh.size(axis) == 1:
            return x
        reduced: Tensor = self._xm.all_reduce(op, x, groups=self._groups[axis], pin_layout=False)
        return reduced

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        if self.mesh.size(axis) == 1:
            return x
        gathered: Tensor = self._xm.all_gather(x, dim=dim, groups=self._groups[axis], pin_layout=False)
        return gathered

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x
        scattered: Tensor = self._xm.reduce_scatter(
            "sum", x, scale=1.0, scatter_dim=dim, shard_count=size, groups=self._groups[axis], pin_layout=False
        )
        return scattered

    def fence(self, x: Tensor) -> Tensor:
        fenced: Tensor = _Fence.apply(x, self._xm)  # type: ignore[no-untyped-call]
        return fenced

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        dtype = v_BKSN.dtype  # torch's autocast for xla passes over attention; rotation made float32 of the others
        return attend(q_BHSN.to(dtype), k_BKSN.to(dtype), v_BKSN, mask_B1SS)

    def place(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def to_host(self, x: Tensor) -> Tensor:
        return x.cpu()

    def end_graph(self) -> None:
        with self._naming_missing_graphs():
            self._xla.sync()

    def defer(self, values: Mapping[str, Tensor]) -> Pending:
        return Pending(values, self._naming_missing_graphs)

    def autocast(self, dtype: str) -> AbstractContextManager[Any]:
        return torch.autocast("xla", torch.bfloat16, enabled=dtype == "bfloat16")

    def compile(self, function: Callable[..., R]) -> Callable[..., R]:
        return function

    def compile_elementwise(self, function: Callable[..., R]) -> Callable[..., R]:
        return function

    def require_warm_cache(self) -> None:
        self._shim = forbid_compiler()

    def cache_report(self) -> CacheReport:
        return CacheReport(_count_modules() - self._num_modules)

    @contextmanager
    def _naming_missing_graphs(self) -> Iterator[None]:
        """Raise `DeviceError` for a graph that had to be compiled where that is forbidden."""
        try:
            yield
        except RuntimeError as error:
            refusal = self._shim.refusal() if self._shim else None
            if refusal:
                raise refusal from error
            raise


class Pending:
    """Values of a graph that has ended: a read waits for the device, and begins no other graph."""

    def __init__(self, values: Mapping[str, Tensor], watch: Callable[[], AbstractContextManager[None]]) -> None:
        self._values, self._watch = values, watch

    def read(self) -> dict[str, float]:
        with self._watch():
            return {name: value.item() for name, value in self._values.items()}


class _Fence(torch.autograd.Function):
    """The identity, which XLA's elimination of common parts does not look through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, xla_model: Any) -> Tensor:
        fenced = x.clone()
        xla_model.optimization_barrier_([fenced])
        return fenced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def import_torch_xla() -> ModuleType:
    """torch_xla, with PINNED_VARIABLES set. Raises `DeviceError` where it is absent, or one has another value."""
    require_pinned(os.environ)
    os.environ.update(PINNED_VARIABLES)
    try:
        import torch_xla  # noqa: PLC0415 - it opens devices, and other backends run where it is absent
        import torch_xla.core.xla_model  # noqa: PLC0415
    except ImportError as error:
        raise DeviceError(
            f"parallel.device = 'xla', and torch_xla is not here ({error}). The neuron images have it: build them with "
            f"`make images VARIANT=neuron` and run the stage in its own, or choose another device: "
            f"--parallel.device=cpu"
        ) from error
    if not hasattr(torch, "xla"):  # torch.utils.checkpoint asks for a module of this name
        torch._register_device_module("xla", torch_xla)
    return torch_xla


def require_pinned(environment: Mapping[str, str]) -> None:
    """Raise `DeviceError` where the environment asks for graphs that nobody else would make."""
    for name, pinned in PINNED_VARIABLES.items():
        if environment.get(name, pinned) != pinned:
            raise DeviceError(
                f"{name}={environment[name]} is set, and graphs are made with {name}={pinned}: another value makes "
                f"other graphs, which no cache holds. Unset it: unset {name}"
            )


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _count_modules() -> int:
    """Graphs in the compile cache that the process was given."""
    folder = os.environ.get(CACHE_VARIABLE, "")
    return len(list(Path(folder).glob("neuronxcc-*/MODULE_*"))) if folder else 0
