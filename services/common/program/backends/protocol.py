"""What differs between devices; the rest of the program is the same code on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from services.common.program.mesh import Axis, Mesh
from services.common.recipe import Device, Recipe

R = TypeVar("R")


@dataclass(frozen=True)
class CacheReport:
    """What became of the compile cache in this process."""

    graphs_compiled: int
    """Graphs that the cache did not hold."""


class DeferredRead(Protocol):
    def read(self) -> dict[str, float]:
        """The values, once the device has computed them."""
        ...


class Collectives(Protocol):
    """Where a worker stands in the mesh, what it computes with others along an axis of it, and what its device has a
    way of its own for: see `Backend`."""

    mesh: Mesh
    is_lazy: bool

    def index(self, axis: Axis) -> Tensor: ...
    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor: ...
    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor: ...
    def fence(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]: ...
    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor: ...


class Backend(Collectives, Protocol):
    """One worker's device, and its connection to those of the others.

    Asked of the class, where there may be no device:

    - `facts(recipe)`: what decides a graph and its bits on this machine, besides source and what the recipe says of
      the program, by name. Raises `DeviceError` when the device is not there, or a program that compiles lacks its
      compiler.
    - `cache_environment(folder, recipe)`: the variables with which a process keeps its compiled graphs in `folder`, and
      compiles others as the recipe says. To be set before the backend is made.

    Made once the worker group has formed; `Backend(mesh, threads, reduction, device, local_rank)` takes the device of
    this name that is the worker's on its node, with `threads` for what runs on the host, and raises `DeviceError` where
    there is none. `device` is then where tensors of the program are, `mesh` where this worker stands.

    Collectives go along one axis of the mesh, are called by all workers of the axis in the same order, and return a new
    tensor, or the given one where the axis has one worker. They raise `WorkersLost`.

    - `index(axis)`: this worker's index along the axis, int32 [1] on the device: the form in which a graph may hold it.
    - `all_reduce(x, axis, op)`: the sum, or the maximum, on every worker the same bits; with reduction `exact` a sum
      also has the same bits for every number of workers.
    - `all_gather(x, axis, dim)`: the workers' tensors, one behind the other along `dim`.
    - `reduce_scatter(x, axis, dim)`: of the sum, this worker's slice along `dim`, which the workers divide evenly.
    - `fence(*tensors, after)`: copies of the tensors: a compiler computes nothing of a copy before `after` is there,
      and takes nothing of it from what it computed of the original. Where `after` has no numbers, they have none.
    - `attend(q, k, v, mask)`: causal attention, see `attention`.

    State is made on `host` and placed. On a device that `is_lazy` nothing is computed before a graph ends; a graph is
    then all that was asked for since the last one, its outputs are all tensors that are alive, and it is compiled. So
    state is placed and not computed, sums are held from step to step, and no view of a tensor is kept.

    - `place(x)`: x of the host, on the device; no graph computes it.
    - `to_host(x)`: x of the device, on the host: itself where the device is the host, otherwise a copy.
    - `end_graph()`: what was computed so far is one graph, and the device may run it.
    - `defer(values)`: read scalars of the device later. This is the only way to read one.
    - `autocast(dtype)`: the context in which the model computes in `dtype`.
    - `compile(function)`: the function, compiled for the shapes of its first call. After `require_warm_cache()` a call
      raises `DeviceError` where the cache does not hold its graph.
    - `compile_elementwise(function)`: the same for a function of vectors, compiled once for all lengths of 2 and more
      where the device allows it: then no graph depends on the number of workers that share a bucket.
    - `cache_report()`: what was not in the cache.
    """

    device: torch.device
    host: torch.device

    def __init__(
        self, mesh: Mesh, threads: int, reduction: str, device: Device = "cpu", local_rank: int = 0
    ) -> None: ...

    @staticmethod
    def facts(recipe: Recipe) -> dict[str, Any]: ...
    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]: ...

    def place(self, x: Tensor) -> Tensor: ...
    def to_host(self, x: Tensor) -> Tensor: ...
    def end_graph(self) -> None: ...
    def defer(self, values: Mapping[str, Tensor]) -> DeferredRead: ...
    def autocast(self, dtype: str) -> AbstractContextManager[Any]: ...
    def compile(self, function: Callable[..., R]) -> Callable[..., R]: ...
    def compile_elementwise(self, function: Callable[..., R]) -> Callable[..., R]: ...
    def require_warm_cache(self) -> None: ...
    def cache_report(self) -> CacheReport: ...
