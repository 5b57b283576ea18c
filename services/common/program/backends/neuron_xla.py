"""The backend of trn1: torch_xla, whose graphs neuronx-cc compiles.

The device is lazy: operations up to `end_graph` become one graph, which the device then runs. The first time a graph is
compiled, for up to an hour, so a run has few graphs and all workers have the same. Tracing needs no Neuron package:
torch_xla makes the graphs on a CPU too, and with PJRT_DEVICE=CPU it runs those of a single worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from services.common.errors import DeviceError
from services.common.program.activation_checkpointing import run_checkpointed
from services.common.program.backends import neuron_distributed
from services.common.program.backends.backend import Backend
from services.common.program.backends.compiler_shim import CompilerShim, forbid_compiler
from services.common.program.backends.xla_environment import (
    CACHE_VARIABLE,
    FLAGS_VARIABLE,
    NEURON,
    PINNED_VARIABLES,
    PJRT_VARIABLE,
    compiler_flags,
    count_modules,
    require_pinned,
    require_runtime,
    torch_xla_is_absent,
    why_without_nxd,
    xla_facts,
)
from services.common.program.buckets import SeparateBucket
from services.common.program.mesh import AXES, Axis, Mesh
from services.common.program.pieces import all_gather_in_pieces, reduce_scatter_in_pieces
from services.common.program.reduction import HeldSum
from services.common.recipe.schema import Device, Recipe
from services.common.recipe.training import ActivationCheckpointing

logger = logging.getLogger(__name__)

MAX_COLLECTIVE_BYTES = 130 * 10**6
"""Bytes of the largest tensor that one reduce-scatter takes or one all-gather makes, in the type that is sent.

NxD 0.18 caps the buckets of both collectives at 130 (`initialize_optimizer_from_class` in trainer/trainer.py: "Bucket
cap >140MB causes NaN at step 3 (known issue)"), and torch_xla's `CoalescingBuckets` counts that in MiB of the type that
is sent. There a bucket consists of whole tensors, and a larger tensor is sent as it is; here every larger tensor is
cut, be it a bucket or an activation.
"""


class NeuronXla(Backend):
    """`Backend` on a NeuronCore of trn1, or on torch_xla's CPU device."""

    runs_eagerly = False
    rounds_weights = False

    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "xla", local_rank: int = 0) -> None:
        if reduction != "fast":
            raise ValueError(f"train.reduction = {reduction!r} would need another graph for each micro-batch of a step")
        torch.set_num_threads(threads)
        self._why_without_nxd = why_without_nxd(os.environ)
        self._claim_device()
        self._xla = import_torch_xla()
        self._xm = self._xla.core.xla_model
        # The autograd engine's thread for the device would still hold gradients when a graph ends: outputs of the graph
        # that nobody reads, and other ones each time.
        torch.autograd.set_multithreading_enabled(False)
        self.mesh, self.device = mesh, self._xla.device()
        # This asks the device itself: `runtime.device_type()` would read the variable again.
        opened, expected = self._xm.xla_device_hw(self.device), os.environ[PJRT_VARIABLE]
        if opened != expected:
            raise DeviceError(
                f"torch_xla opened its {opened} device, and {PJRT_VARIABLE} is {expected}: it was imported before the "
                f"variable was set, or the Neuron runtime did not start. Its messages are above."
            )
        self._flash_attention: neuron_distributed.FlashAttention | None = None
        if not self._why_without_nxd:
            neuron_distributed.require_groups(mesh)
            self._flash_attention = neuron_distributed.FlashAttention.load()
        self._attentions_told: set[str] = set()
        self._groups = {axis: mesh.groups(axis) for axis in AXES}
        self._indices = {axis: self.place(torch.tensor([mesh.index(axis)], dtype=torch.int32)) for axis in AXES}
        self._num_modules = count_modules()
        self._shim: CompilerShim | None = None

    def _claim_device(self) -> None:
        """Let torch_xla open this worker's NeuronCore, and no other device instead."""
        require_runtime(os.environ)
        os.environ.setdefault(PJRT_VARIABLE, NEURON)

    @staticmethod
    def facts(recipe: Recipe) -> dict[str, Any]:
        return xla_facts(recipe)

    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        # The name of a graph in the cache ends in a hash of the flags.
        return {CACHE_VARIABLE: str(folder), FLAGS_VARIABLE: " ".join(compiler_flags(recipe))}

    def index(self, axis: Axis) -> Tensor:
        return self._indices[axis]

    # With `pin_layout=True` torch_xla would implement all-gather and reduce-scatter by all-reduces.

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        if self.mesh.size(axis) == 1:
            return x
        return self._xm.all_reduce(op, x, groups=self._groups[axis], pin_layout=False)

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x

        def gather(part: Tensor, dim: int) -> Tensor:
            return self._xm.all_gather(part, dim=dim, groups=self._groups[axis], pin_layout=False)

        return all_gather_in_pieces(gather, x, size, dim, MAX_COLLECTIVE_BYTES)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        size = self.mesh.size(axis)
        if size == 1:
            return x

        def scatter(part: Tensor, dim: int) -> Tensor:
            groups = self._groups[axis]
            return self._xm.reduce_scatter(
                "sum", part, scale=1.0, scatter_dim=dim, shard_count=size, groups=groups, pin_layout=False
            )

        return reduce_scatter_in_pieces(scatter, x, size, dim, MAX_COLLECTIVE_BYTES)

    def fence(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        """Put an optimization barrier around tensors; see `activation_checkpointing.Fence`."""
        return _Fence.apply(self._xm, after, *tensors)  # type: ignore[no-untyped-call]

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        dtype = v_BKSN.dtype  # rotation made q and k float32, and torch's autocast for xla does not round for attention
        q_BHSN, k_BKSN = q_BHSN.to(dtype), k_BKSN.to(dtype)
        # All workers decide alike: by shapes, and by the environment, which is in their facts.
        reason = self._why_without_nxd or neuron_distributed.why_not_flash(q_BHSN, v_BKSN, mask_B1SS)
        self._tell_attention(reason)
        if self._flash_attention is None or reason:
            return super().attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)
        return self._flash_attention(q_BHSN, k_BKSN, v_BKSN)

    def run_checkpointed(self, layer: nn.Module, mode: ActivationCheckpointing, *arguments: Tensor | None) -> Tensor:
        return run_checkpointed(layer, mode, *arguments, fence=self.fence)

    def _tell_attention(self, reason: str) -> None:
        """Log once which attention runs, and why it is not NxD's."""
        if self.mesh.rank == 0 and reason not in self._attentions_told:
            self._attentions_told.add(reason)
            logger.info("attention: %s", f"torch's SDPA ({reason})" if reason else "NxD's NKI flash attention")

    def make_bucket(
        self, parameters: Mapping[str, nn.Parameter], num_blocks: int, sum_axis: Axis | None
    ) -> SeparateBucket:
        return SeparateBucket(parameters, num_blocks, sum_axis, self.place, self.to_host)

    def make_sum(self, size: int, in_tree: bool) -> HeldSum:
        return HeldSum(self.place(torch.zeros(size, device=self.host)))

    def sliceable(self, x: Tensor) -> Tensor:
        return self.to_host(x)  # a view on the device would be a graph of its own

    def keep(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ()  # a kept tensor would be one more output of the step's graph

    def end_graph(self) -> None:
        with self._naming_missing_graphs():
            self._xla.sync()

    def read(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        with self._naming_missing_graphs():
            return super().read(values)

    def require_warm_cache(self) -> None:
        self._shim = forbid_compiler()

    def graphs_compiled(self) -> int:
        return count_modules() - self._num_modules

    @contextmanager
    def _naming_missing_graphs(self) -> Iterator[None]:
        """Raise `DeviceError` where a graph had to be compiled although `require_warm_cache` forbids it."""
        try:
            yield
        except RuntimeError as error:
            refusal = self._shim.refusal() if self._shim else None
            if refusal:
                raise refusal from error
            raise


class _Fence(torch.autograd.Function):
    """The identity, behind which XLA's common-subexpression elimination does not look."""

    @staticmethod
    def forward(ctx: Any, xla_model: Any, after: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        *fenced, first_1 = [each.clone() for each in (*tensors, after.flatten()[:1])]
        xla_model.optimization_barrier_([*fenced, first_1])
        # XLA's CPU compiler removes barriers before it merges common subexpressions a last time, and before it orders
        # operations: of 16 products that 2 layers recomputed, 6 were merged all the same. A tensor whose value depends
        # on `after` stays another tensor: where `after` is NaN, so is the tensor.
        is_nan_1 = first_1 != first_1
        kept = [
            torch.where(is_nan_1, first_1.to(each.dtype), each) if each.is_floating_point() else each for each in fenced
        ]
        # A copy requires a gradient where its original does: autograd compares what a recomputation saves.
        ctx.mark_non_differentiable(*(kept[at] for at, each in enumerate(tensors) if not each.requires_grad))
        return tuple(kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *gradients


def import_torch_xla() -> ModuleType:
    """Import torch_xla with PINNED_VARIABLES set.

    Raises `DeviceError` where torch_xla is absent, or a pinned variable has another value.
    """
    require_pinned(os.environ)
    os.environ.update(PINNED_VARIABLES)
    try:
        import torch_xla  # noqa: PLC0415 - it opens devices, and other backends run where it is absent
        import torch_xla.core.xla_model  # noqa: PLC0415
    except ImportError as error:
        raise torch_xla_is_absent(str(error)) from error
    if not hasattr(torch, "xla"):  # torch.utils.checkpoint looks for the module of a device by its name
        torch._register_device_module("xla", torch_xla)
    return torch_xla
