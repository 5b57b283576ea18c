"""The device seam: every difference between devices is behind `Backend`; the rest of the program is common to all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.program import activation_checkpointing
from services.common.program.buckets import Bucket
from services.common.program.mesh import Axis, Mesh
from services.common.program.process_group import GLOO
from services.common.program.reduction import Sum
from services.common.program.snapshot import Snapshots
from services.common.recipe.schema import Device, Recipe
from services.common.recipe.training import ActivationCheckpointing

R = TypeVar("R")


class Collectives:
    """What layers and loss call: this rank's mesh, its collectives, and operations of its device. This class itself is
    for a model on one rank of the host's CPU.

    Collectives go along one axis of the mesh. All ranks of the axis call them in the same order. They return a new
    tensor, or the given one where the axis has one rank, and raise `WorkersLost` where another worker has ended.
    """

    mesh = Mesh(0, data_parallel_size=1)
    runs_eagerly = True
    """Whether code that is not compiled runs operation by operation, in kernels of torch whose bits are known."""

    def index(self, axis: Axis) -> Tensor:
        """Return this rank's index along the axis as int32 [1] on the device: the only form that a graph may hold."""
        return torch.zeros(1, dtype=torch.int32)

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum or the maximum over the ranks, with the same bits on each.

        With `train.reduction = "exact"` a sum also has the same bits for every number of ranks.
        """
        return x

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        """Return the ranks' tensors concatenated along `dim`, in the order of their index."""
        return x

    def start_all_gather(self, x: Tensor, axis: Axis) -> Callable[[], Tensor]:
        """Start `all_gather`, and return the function that waits for its result; meanwhile other work can be done."""
        return partial(self.all_gather, x, axis)

    def start_reduce_scatter(self, x: Tensor, axis: Axis) -> Callable[[], Tensor]:
        """Start `reduce_scatter`, and return the function that waits for its result."""
        return partial(self.reduce_scatter, x, axis)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        """Return this rank's slice along `dim` of the sum over the ranks; their number divides that dimension."""
        return x

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        """Return attention [B, H, S, N] of each token to itself and earlier tokens, or to those that the mask allows,
        by the device's best kernel: B sequences, S positions, H query heads, K key-value heads, N head dimension.
        """
        return F.scaled_dot_product_attention(
            q_BHSN,
            k_BKSN,
            v_BKSN,
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            scale=q_BHSN.shape[-1] ** -0.5,
            enable_gqa=k_BKSN.shape[1] < q_BHSN.shape[1],
        )

    def run_checkpointed(self, layer: nn.Module, mode: ActivationCheckpointing, *arguments: Tensor | None) -> Tensor:
        """Return `layer(*arguments)`, keeping for the backward pass the activations that `mode` says; see
        `activation_checkpointing`.
        """
        return activation_checkpointing.run_checkpointed(layer, mode, *arguments)


class Backend(Collectives, ABC):
    """One worker's device and its connection to the other workers' devices.

    State is made on `host` and placed on `device`. A device may be lazy, as torch_xla's is: it computes nothing before
    `end_graph`, and then compiles and runs everything since the last one as one graph, whose outputs are all tensors
    that are still alive. Code above this seam holds for such a device too: it places state instead of computing it,
    drops gradients before the graph ends, and takes no view of a tensor except through `sliceable`.
    """

    device: torch.device
    host = torch.device("cpu")
    rounds_weights: bool
    """Whether weights that are only multiplied with are stored in `train.dtype`. Elsewhere autocast rounds each use."""

    @abstractmethod
    def __init__(self, mesh: Mesh, threads: int, reduction: str, device: Device = "cpu", local_rank: int = 0) -> None:
        """Open the device of this name that belongs to worker `local_rank` of the node, after the process group formed.

        `threads` is the number of CPU threads for work on the host. Raises `DeviceError` where there is no device.
        """

    @staticmethod
    @abstractmethod
    def facts(recipe: Recipe) -> dict[str, Any]:
        """Return by name what decides a graph and its bits on this machine, besides the source and the recipe.

        It opens no device. Raises `DeviceError` where the device is absent, or the recipe compiles and the compiler is.
        """

    @staticmethod
    def world_collectives(device: Device) -> str:
        """Return the name of the torch.distributed backend of torch's own group of all workers, and make it known.

        Set the variables of `cache_environment` before: this may import the device's library.
        """
        return GLOO

    @staticmethod
    @abstractmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        """Return the variables with which a process keeps its compiled graphs in `folder`, and compiles with the
        recipe's flags. Set them before the backend is made.
        """

    @staticmethod
    def trace_environment(recipe: Recipe) -> dict[str, str]:
        """Return further variables of a process that compiles the recipe's graphs and trains nothing, where workers get
        theirs from their launcher.

        With `compile.trace_on = "cpu"` they let it compile without the device, where its library does. Raises
        `DeviceError` where the recipe lacks what the device would tell.
        """
        return {}

    @staticmethod
    def ranks_to_trace(recipe: Recipe) -> tuple[int, ...]:
        """Return ranks whose graphs together are those of all workers: 0, and others where a graph may list the ranks
        that its collectives connect. If the second has the graphs of the first, all have them.
        """
        return (0,)

    def make_bucket(self, parameters: Mapping[str, nn.Parameter], num_blocks: int, sum_axis: Axis | None) -> Bucket:
        """Make the bucket of these parameters in the memory layout that suits the device."""
        return Bucket(parameters, num_blocks, sum_axis)

    @abstractmethod
    def make_sum(self, size: int, in_tree: bool) -> Sum:
        """Make a sum of tensors [size] over this rank's micro-batches.

        `in_tree` asks for the fixed binary tree of `reduction`; a device whose graphs must not depend on the number of
        micro-batches adds one after the other anyway.
        """

    def make_snapshots(self) -> Snapshots:
        """Make the memory on the host that holds the state of a checkpoint."""
        return Snapshots()

    def has_fused_adamw(self, is_compiled: bool) -> bool:
        """Whether torch's fused AdamW kernel is here, and faster than the update that the program would run instead,
        compiled or not.
        """
        return False

    def place(self, x: Tensor) -> Tensor:
        """Return a host tensor on the device; no graph computes it."""
        return x.to(self.device)

    def send(self, x: Tensor) -> Tensor:
        """Return a micro-batch's tensor on the device. The host does not wait for earlier work of the device."""
        return x.to(self.device)

    def to_host(self, x: Tensor) -> Tensor:
        """Return a device tensor on the host: the tensor itself where the device is the host, otherwise a copy."""
        return x.cpu()

    def sliceable(self, x: Tensor) -> Tensor:
        """Return a tensor with the values of `x` whose views compute nothing: `x` itself, or a copy on the host."""
        return x

    def keep(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors for use after the step, or nothing where they would be further outputs of its graph."""
        return tensors

    def end_graph(self) -> None:
        """End the graph of everything computed since the last call, where the device is lazy; it may run it."""

    def read(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Wait for the device and return these scalars. The program reads no device scalar in another way."""
        return {name: value.item() for name, value in values.items()}

    def autocast(self, dtype: str) -> AbstractContextManager[Any]:
        """Return the context in which the model computes in `dtype`."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        """Compile a function for the shapes of its first call, or, where it `is_dynamic` and the device allows it, a
        function of vectors once for all lengths from 2: no graph then depends on the number of ranks of a bucket.

        After `require_warm_cache` a call raises `DeviceError` where the cache does not hold its graph.
        """
        return function

    @abstractmethod
    def require_warm_cache(self) -> None:
        """Forbid compilation from now on."""

    @abstractmethod
    def graphs_compiled(self) -> int:
        """Return the number of graphs that were compiled because the cache did not hold them."""
