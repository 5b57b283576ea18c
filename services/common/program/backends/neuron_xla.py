"""Trainium by torch_xla: the device of trn1, whose graphs neuronx-cc compiles.

Nothing is computed when it is asked for. What was asked for up to `end_graph` is a graph, which the device runs; the
first time it is compiled, which takes up to an hour, so a run has few graphs and every worker the same. Tracing alone
needs no Neuron package: torch_xla makes the graphs on a CPU too, and runs those of one worker where it is told to
(PJRT_DEVICE=CPU).
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from services.common.credentials import is_secret
from services.common.errors import DeviceError
from services.common.image_platform import neuron_chips
from services.common.instance_types import family_of
from services.common.program import attention
from services.common.program.backends import neuron_distributed
from services.common.program.backends.compiler_shim import CompilerShim, forbid_compiler
from services.common.program.backends.protocol import CacheReport
from services.common.program.buckets import choose_num_blocks
from services.common.program.mesh import AXES, Axis, Mesh
from services.common.program.pieces import all_gather_in_pieces, reduce_scatter_in_pieces
from services.common.recipe import Device, Recipe

R = TypeVar("R")

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
PINNED_VARIABLES = {
    "XLA_IR_DEBUG": "0",  # these two write paths of source files into graphs
    "XLA_HLO_DEBUG": "0",
    "XLA_DISABLE_FUNCTIONALIZATION": "0",  # another hash, and a gap in convergence with ZeRO-1 where it is 1
    # A sum over one worker would not be in the graph; one process that traces for many is alone.
    "XLA_ALWAYS_ALLREDUCE": "1",
}
"""Read once, when torch_xla is imported. They change graphs, so they have one value."""
FORBIDDEN_VARIABLES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Make bfloat16 of float32 behind the program's back. NxD's attention reads them too, where they are 0 as well: it then
keeps a softmax's sums in bfloat16."""
_GRAPH_VARIABLES = (
    "XLA_",
    "NEURON_FUSE_",
    "NEURON_CUSTOM_",
    "NEURON_LOGICAL_NC_",
    "NEURON_PLATFORM_",
    "NEURON_RT_STOCH",
)
FLAGS_VARIABLE = "NEURON_CC_FLAGS"
PJRT_VARIABLE = "PJRT_DEVICE"
NEURON, CPU = "NEURON", "CPU"
MAX_COLLECTIVE_BYTES = 130 * 10**6
"""Bytes of the largest tensor that one reduce-scatter sums, or one all-gather makes, in the type in which it is sent.

NxD 0.18 caps both at 130 (`initialize_optimizer_from_class` in trainer/trainer.py: "Bucket cap >140MB causes NaN at
step 3 (known issue)"), which torch_xla's `CoalescingBuckets` takes as MiB of the tensors in the types in which they are
sent. It puts whole tensors together, and sends a larger one as it is; here each is cut, of buckets and of activations.
"""
DISTRIBUTIONS = ("torch_xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "neuronx_distributed", "nki")


class NeuronXla:
    """See `Backend`."""

    is_lazy = True
    host = torch.device("cpu")

    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "xla", local_rank: int = 0) -> None:
        if reduction != "fast":
            raise ValueError(f"the sums of {reduction!r} are another graph for each micro-batch of a step")
        torch.set_num_threads(threads)
        self._why_without_nxd = why_without_nxd(os.environ)
        self._claim_device()
        self._xla = import_torch_xla()
        self._xm = self._xla.core.xla_model
        # The engine's own thread for the device would still hold gradients when the graph ends: outputs that nobody
        # reads, other ones each time.
        torch.autograd.set_multithreading_enabled(False)
        self.mesh, self.device = mesh, self._xla.device()
        # Of the device itself: `runtime.device_type()` would read the variable again.
        require_opened(self._xm.xla_device_hw(self.device), os.environ[PJRT_VARIABLE])
        self._flash_attention: neuron_distributed.FlashAttention | None = None
        if not self._why_without_nxd:
            neuron_distributed.require_groups(mesh)
            self._flash_attention = neuron_distributed.FlashAttention.load()
        self._attentions_told: set[str] = set()
        self._groups = {axis: mesh.groups(axis) for axis in AXES}
        self._indices = {axis: self.place(torch.tensor([mesh.index(axis)], dtype=torch.int32)) for axis in AXES}
        self._num_modules = _count_modules()
        self._shim: CompilerShim | None = None

    def _claim_device(self) -> None:
        """Let torch_xla open the NeuronCore that is this worker's, and no other device instead."""
        require_runtime(os.environ)
        os.environ.setdefault(PJRT_VARIABLE, NEURON)

    @staticmethod
    def facts(recipe: Recipe) -> dict[str, Any]:
        require_pinned(os.environ)
        require_flags(os.environ, recipe)
        if importlib.util.find_spec("torch_xla") is None:
            raise _torch_xla_is_absent("it is not installed")
        models = recipe.parallel.data_parallel_size
        return {
            "libraries": {name: _version_of(name) for name in DISTRIBUTIONS},
            "pjrt_device": pjrt_device(os.environ),
            # A whole update is a graph, which lists the ranks that sum together, and has shapes of its blocks.
            "data_parallel_size": models,
            "zero_stage": recipe.parallel.zero_stage,
            "blocks": choose_num_blocks(recipe.batch.num_micro_batches, models),
            "compiler_flags": list(compiler_flags(recipe)),
            "flash_attention": why_without_nxd(os.environ) or "NxD's, of sequences that it takes",
            "environment": {
                **PINNED_VARIABLES,
                **{
                    name: value
                    for name, value in sorted(os.environ.items())
                    if name.startswith(_GRAPH_VARIABLES) and not is_secret(name, value)
                },
            },
        }

    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        # A graph's name in the cache ends in a hash of the flags.
        return {CACHE_VARIABLE: str(folder), FLAGS_VARIABLE: " ".join(compiler_flags(recipe))}

    def index(self, axis: Axis) -> Tensor:
        return self._indices[axis]

    # `pin_layout` would make an all-gather and a reduce-scatter of all-reduces.

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        if self.mesh.size(axis) == 1:
            return x
        reduced: Tensor = self._xm.all_reduce(op, x, groups=self._groups[axis], pin_layout=False)
        return reduced

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x

        def gather(part: Tensor, dim: int) -> Tensor:
            gathered: Tensor = self._xm.all_gather(part, dim=dim, groups=self._groups[axis], pin_layout=False)
            return gathered

        return all_gather_in_pieces(gather, x, size, dim, MAX_COLLECTIVE_BYTES)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x

        def scatter(part: Tensor, dim: int) -> Tensor:
            groups = self._groups[axis]
            scattered: Tensor = self._xm.reduce_scatter(
                "sum", part, scale=1.0, scatter_dim=dim, shard_count=size, groups=groups, pin_layout=False
            )
            return scattered

        return reduce_scatter_in_pieces(scatter, x, size, dim, MAX_COLLECTIVE_BYTES)

    def fence(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        fenced: tuple[Tensor, ...] = _Fence.apply(self._xm, after, *tensors)  # type: ignore[no-untyped-call]
        return fenced

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        dtype = v_BKSN.dtype  # torch's autocast for xla passes over attention; rotation made float32 of the others
        q_BHSN, k_BKSN = q_BHSN.to(dtype), k_BKSN.to(dtype)
        # What decides is the same for all workers: the environment, which their facts hold, and shapes.
        reason = self._why_without_nxd or neuron_distributed.why_not_flash(q_BHSN, v_BKSN, mask_B1SS)
        self._tell_attention(reason)
        if self._flash_attention is None or reason:
            return attention.attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)
        return self._flash_attention(q_BHSN, k_BKSN, v_BKSN)

    def _tell_attention(self, reason: str) -> None:
        if self.mesh.rank == 0 and reason not in self._attentions_told:
            self._attentions_told.add(reason)
            logger.info("attention: %s", f"torch's SDPA ({reason})" if reason else "NxD's NKI flash attention")

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
    def forward(ctx: Any, xla_model: Any, after: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        *fenced, first_1 = [each.clone() for each in (*tensors, after.flatten()[:1])]
        xla_model.optimization_barrier_([*fenced, first_1])
        # XLA's CPU compiler takes barriers out before it looks for common parts a last time, and before it orders what
        # there is: of 16 products that 2 layers computed again, 6 were merged all the same. A tensor that needs `after`
        # in what it is stays another. Where that is no number, neither is what comes of it.
        is_nan_1 = first_1 != first_1
        kept = [
            torch.where(is_nan_1, first_1.to(each.dtype), each) if each.is_floating_point() else each for each in fenced
        ]
        # A copy asks for a gradient where its original does: autograd compares what a recomputation saves.
        ctx.mark_non_differentiable(*(kept[at] for at, each in enumerate(tensors) if not each.requires_grad))
        return tuple(kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *gradients


def import_torch_xla() -> ModuleType:
    """torch_xla, with PINNED_VARIABLES set. Raises `DeviceError` where it is absent, or one has another value."""
    require_pinned(os.environ)
    os.environ.update(PINNED_VARIABLES)
    try:
        import torch_xla  # noqa: PLC0415 - it opens devices, and other backends run where it is absent
        import torch_xla.core.xla_model  # noqa: PLC0415
    except ImportError as error:
        raise _torch_xla_is_absent(str(error)) from error
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
    for name in FORBIDDEN_VARIABLES:
        if name in environment:
            raise DeviceError(
                f"{name}={environment[name]} is set, and types are the recipe's (train.dtype, train.param_dtype): it "
                f"rounds to bfloat16 what is to be float32. Unset it: unset {name}"
            )


def compiler_flags(recipe: Recipe) -> tuple[str, ...]:
    """Of neuronx-cc, which compiles for the family of the nodes that train, whatever node it is on."""
    return (f"--target={family_of(recipe.cluster.trainer_instance_type)}", *recipe.compile.flags)


def require_flags(environment: Mapping[str, str], recipe: Recipe) -> None:
    """Raise `DeviceError` where the environment has other flags than the recipe, which no cache was made with."""
    flags = " ".join(compiler_flags(recipe))
    if environment.get(FLAGS_VARIABLE, flags) != flags:
        raise DeviceError(
            f"{FLAGS_VARIABLE}={environment[FLAGS_VARIABLE]!r} is set, and the recipe has {flags!r}. Flags are the "
            f"recipe's, in compile.flags: unset {FLAGS_VARIABLE}"
        )


def pjrt_device(environment: Mapping[str, str]) -> str:
    """What torch_xla is to compute on: NEURON, unless CPU was asked for. Raises `DeviceError` for another."""
    device = environment.get(PJRT_VARIABLE, NEURON)
    if device not in (NEURON, CPU):
        raise DeviceError(
            f"{PJRT_VARIABLE}={device} is set, and parallel.device = 'xla' is a NeuronCore, or torch_xla's CPU device "
            f"where {PJRT_VARIABLE}={CPU} says so. Unset it: unset {PJRT_VARIABLE}"
        )
    return device


def require_runtime(environment: Mapping[str, str]) -> None:
    """Raise `DeviceError` where torch_xla would find no NeuronCore: it would compute on the host, for weeks."""
    if pjrt_device(environment) == CPU:
        return
    missing = []
    if importlib.util.find_spec("libneuronxla") is None:
        missing.append("libneuronxla, which the neuron images have (make images VARIANT=neuron)")
    if not neuron_chips():
        missing.append("a Neuron device, /dev/neuron0 and on (a trn1 node shows them to pods that ask for them)")
    if missing:
        raise DeviceError(
            f"parallel.device = 'xla', and this node lacks {' and '.join(missing)}. torch_xla would compute on the "
            f"host instead. Run on a Trainium node in a neuron image; for a trial on the host, of one worker, set "
            f"{PJRT_VARIABLE}={CPU}"
        )


def require_opened(device_type: str, expected: str) -> None:
    """Raise `DeviceError` where torch_xla computes on another kind of hardware than the one that it was told."""
    if device_type != expected:
        raise DeviceError(
            f"torch_xla opened its {device_type} device, and {PJRT_VARIABLE} is {expected}: it was imported before the "
            f"variable was set, or the Neuron runtime did not start. Its messages are above."
        )


def why_without_nxd(environment: Mapping[str, str]) -> str:
    """Why nothing of NxD is used here; empty where it is. The same for a trace and for the run that it is made for."""
    if pjrt_device(environment) == CPU:
        return f"{PJRT_VARIABLE}={CPU}, and NxD's kernels are for NeuronCores"
    return "" if neuron_distributed.is_installed() else "neuronx_distributed is not installed"


def _torch_xla_is_absent(reason: str) -> DeviceError:
    return DeviceError(
        f"parallel.device = 'xla', and torch_xla is not here ({reason}). The neuron images have it: build them with "
        f"`make images VARIANT=neuron` and run the stage in its own, or choose another device: --parallel.device=cpu"
    )


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _count_modules() -> int:
    """Graphs in the compile cache that the process was given."""
    folder = os.environ.get(CACHE_VARIABLE, "")
    return sum(path.is_dir() for path in Path(folder).glob("neuronxcc-*/MODULE_*")) if folder else 0
