"""Traces one train step of a whole topology: one rank of a fake process group, on torch's fake tensors.

It is the judge of `memory_estimate`, and of the sizes of collectives.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.common.program.backends.neuron_xla import MAX_COLLECTIVE_BYTES
from services.common.program.backends.torch_native import GROUP_NAMES, OPS, TorchNative
from services.common.program.mesh import Axis, Mesh, make_mesh
from services.common.program.micro_batch import MicroBatch, make_synthetic_micro_batch
from services.common.program.pieces import all_gather_in_pieces, reduce_scatter_in_pieces
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.memory_estimate import (
    FLOAT32_BYTES,
    micro_batches_per_model,
    sums_beside_a_gradient,
)
from services.common.recipe.schema import Recipe

RING_PASSES = {  # how often a ring of n workers carries (n - 1) / n of the whole tensor past each of them
    OPS.all_gather_into_tensor.default: 1,
    OPS.reduce_scatter_tensor.default: 1,
    OPS.all_to_all_single.default: 1,
    OPS.all_reduce.default: 2,
}
_AXES_BY_GROUP = {name: axis for axis, name in GROUP_NAMES.items()}
MAX_MICRO_BATCHES = 2  # the first leaves a sum, and all later ones do the same as the second


@dataclass
class Trace:
    """Memory and collectives of a step, or of a part of one, on each worker of the topology."""

    peak_bytes: int
    """Largest number of bytes of live tensors, if each operation runs by itself."""
    sent_bytes: Counter[Axis] = field(default_factory=Counter)
    """Bytes that a worker sends to the others along an axis of the mesh, around a ring."""
    largest_bytes: Counter[Axis] = field(default_factory=Counter)
    """Bytes of the largest tensor that one call sums, gathers or exchanges along an axis."""
    parameters: int = 0
    """Number of parameters that a worker holds."""


def trace_step(recipe: Recipe) -> Trace:
    """Make the programs of the first and of the last rank, and trace one step of the first.

    Raises `AssertionError` unless both hold parts of equal shapes, and all parts together are the recipe's model.
    """
    recipe = recipe.model_copy(update={"compile": recipe.compile.model_copy(update={"enabled": False})})
    workers = recipe.parallel.num_workers
    with _fake_program(recipe, rank=workers - 1) as (last, _):
        last_shapes = _require_whole_model(last)
    with _fake_program(recipe, rank=0) as (program, watch):
        assert _require_whole_model(program) == last_shapes, "ranks hold parts of different shapes"
        return _trace(program, watch)


@contextmanager
def _fake_program(recipe: Recipe, rank: int) -> Iterator[tuple[Program, _Watch]]:
    world_size = recipe.parallel.num_workers
    group = ProcessGroup.fake(world_size, rank)
    try:
        mesh = make_mesh(recipe, rank, world_size)
        with FakeTensorMode():
            make_backend = _InPieces if recipe.parallel.device == "xla" else TorchNative
            backend = make_backend(mesh, recipe.parallel.threads_per_worker, recipe.train.reduction)
            with _Watch(mesh) as watch:
                yield Program(recipe, backend, draws_weights=False), watch
    finally:
        group.leave()


class _InPieces(TorchNative):
    """Cuts collectives as the backend for `xla` does, which can be imported only where torch_xla is installed."""

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        gather = super().all_gather
        return all_gather_in_pieces(
            lambda piece, along: gather(piece, axis, along), x, self.mesh.size(axis), dim, MAX_COLLECTIVE_BYTES
        )

    def start_reduce_scatter(self, x: Tensor, axis: Axis) -> Callable[[], Tensor]:
        start = super().start_reduce_scatter
        return lambda: reduce_scatter_in_pieces(
            lambda piece, _: start(piece, axis)(), x, self.mesh.size(axis), 0, MAX_COLLECTIVE_BYTES
        )

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        scatter = super().reduce_scatter
        return reduce_scatter_in_pieces(
            lambda piece, along: scatter(piece, axis, along), x, self.mesh.size(axis), dim, MAX_COLLECTIVE_BYTES
        )


def _require_whole_model(program: Program) -> dict[str, torch.Size]:
    """Return the shapes of the worker's parts, by name, after a check that all workers' parts make the whole model."""
    recipe, shardings, mesh = program.recipe, program.model.shardings(), program.backend.mesh
    shapes = {name: parameter.shape for name, parameter in program.model.named_parameters()}
    whole = sum(shardings[name].full_shape(shape).numel() for name, shape in shapes.items())
    assert whole == recipe.model.num_parameters, f"rank {mesh.rank} holds parts of {whole:,} parameters"
    for name, sharding in shardings.items():
        share = mesh.tensor_parallel_size // sharding.num_shards
        assert sharding.shard == (mesh.index("tensor") // share if sharding.num_shards > 1 else 0), name
    return shapes


def _trace(program: Program, watch: _Watch) -> Trace:
    recipe, num_micro_batches = program.recipe, micro_batches_per_model(program.recipe)
    num_traced = min(MAX_MICRO_BATCHES, num_micro_batches)
    phases: list[Trace] = []

    def micro_batches() -> Iterator[MicroBatch]:
        for _ in range(num_traced):
            watch.begin_phase()
            yield make_synthetic_micro_batch(recipe)
            phases.append(watch.phase)
        watch.begin_phase()

    program.train_step(0, micro_batches())
    parameters = sum(parameter.numel() for parameter in program.model.parameters())
    more_sums = sums_beside_a_gradient(recipe, num_micro_batches) - sums_beside_a_gradient(recipe, num_traced)
    micro_batch, update = phases[-1], watch.phase
    in_micro_batches = Counter({axis: sent * num_micro_batches for axis, sent in micro_batch.sent_bytes.items()})
    return Trace(
        max(micro_batch.peak_bytes + int(FLOAT32_BYTES * parameters * more_sums), update.peak_bytes),
        in_micro_batches + update.sent_bytes,
        micro_batch.largest_bytes | update.largest_bytes,
        parameters,
    )


@dataclass
class _Allocation:
    num_bytes: int
    num_storages: int = 1


class _Watch(TorchDispatchMode):
    """Follows each operation: the bytes that are alive after it, and the bytes that a collective sends."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh
        self._allocations: dict[int, _Allocation] = {}  # by their storages
        self._sent: dict[int, Tensor] = {}  # by the storage of the result
        self._live_bytes = 0
        self.phase = Trace(0)

    def begin_phase(self) -> None:
        """Begin a phase with a peak and collectives of its own."""
        self.phase = Trace(self._live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fake tensors call this ten times as often as all else
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if func in RING_PASSES:
            self._count_bytes(func, args)
            self._sent[_key(out)] = args[0]  # alive until it was sent
        if func is OPS.wait_tensor.default:
            self._sent.pop(_key(args[0]), None)
        # Waiting returns the same tensor, but a fake tensor then has another storage.
        same = self._allocations[_key(args[0])] if func is OPS.wait_tensor.default else None
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in self._allocations:
                self._follow(tensor, same)
        return out

    def _count_bytes(self, func: Any, args: Any) -> None:
        axis, passes = _AXES_BY_GROUP[args[-1]], RING_PASSES[func]
        size = self._mesh.size(axis)
        whole_bytes = args[0].nbytes * (size if func is OPS.all_gather_into_tensor.default else 1)
        self.phase.sent_bytes[axis] += passes * whole_bytes * (size - 1) // size
        self.phase.largest_bytes |= Counter({axis: whole_bytes})

    def _follow(self, tensor: Tensor, same: _Allocation | None) -> None:
        storage = tensor.untyped_storage()
        if same:
            same.num_storages += 1
        allocation = same or _Allocation(storage.nbytes())
        if not same:
            self._live_bytes += allocation.num_bytes
            self.phase.peak_bytes = max(self.phase.peak_bytes, self._live_bytes)
        self._allocations[_key(tensor)] = allocation
        weakref.finalize(storage, self._drop, _key(tensor))

    def _drop(self, key: int) -> None:
        allocation = self._allocations.pop(key)
        allocation.num_storages -= 1
        if allocation.num_storages == 0:
            self._live_bytes -= allocation.num_bytes


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
