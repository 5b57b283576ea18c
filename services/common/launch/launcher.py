"""Describes the two launchers: `inline` starts processes of this machine, `ray` starts processes on a Ray cluster.

Both run the same functions with the same arguments, and both raise the exception that a function raised.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from services.common.errors import HardwareFault, MillraceError, WorkersLost

T = TypeVar("T")
R = TypeVar("R")

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# On a cluster every Ray node declares one unit of its stage's resource. The driver takes DRIVER_SHARE of that unit,
# which places the driver on a node of the stage, and leaves the rest to the workers.
STAGE_RESOURCE_PREFIX = "stage_"
DRIVER_SHARE = 0.01

NODE_SECONDS = 300.0
"""Seconds in which a task of `Launcher.map_nodes` has to end: a file system that hangs would hold it for ever."""

INLINE = "inline"
"""Name of the launcher whose workers are all on the command's own node."""
LAUNCHERS = {"ray": "services.common.launch.ray_launcher", INLINE: "services.common.launch.inline"}


@dataclass(frozen=True)
class WorkerGroupSpec:
    """Describes the worker processes that a launcher starts together."""

    num_workers: int
    threads_per_worker: int
    workers_per_node: int
    """Largest number of workers on a node of a cluster."""
    shared_folder: Path
    """Folder for the launcher's own files, which every node sees and no other command uses. The launcher removes them
    when the workers have ended.
    """
    device: str = "cpu"
    """Device of every worker, as a recipe names it. A worker knows its NeuronCore before its function is called."""
    logical_core_size: int | None = None
    """Physical NeuronCores in the logical core of a worker, where the instance type leaves a choice (Neuron's LNC)."""
    preload: tuple[str, ...] = ()
    """Modules, and functions as MODULE:FUNCTION. On Linux workers are forked from a process that has imported or called
    them, so nothing here may leave a thread.
    """
    kept_folder: str = ""
    """Name of a private folder that each node keeps from the first start of the workers to the end of the last."""


@dataclass(frozen=True)
class TaskDemand:
    """CPUs and memory that a task needs. A cluster places tasks by this demand and does not enforce it."""

    num_cpus: int = 1
    memory_bytes: int = 0

    def count_on(self, cpus: float, memory_bytes: float) -> int:
        """Number of these tasks that a node of this size can run at a time."""
        by_memory = [int(memory_bytes // self.memory_bytes)] if self.memory_bytes else []
        return min([int(cpus // self.num_cpus), *by_memory])


@dataclass(frozen=True)
class LostTask:
    """Stands for the result of a task whose process died before the task returned."""

    reason: str
    is_out_of_memory: bool = False
    """Whether the node killed the task's process because memory ran out."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """Tells a worker process its rank, its node, and where it meets the other workers."""

    rank: int
    world_size: int
    rendezvous: str = ""
    """`tcp://HOST:PORT`, or the path of a file that all workers see. A single worker does not use it."""
    local_rank: int = 0
    """Rank of the worker among those of its node, which share the node's devices."""
    local_world_size: int = 1
    """Number of workers on the worker's node."""
    node_rank: int = 0
    """Rank of the worker's node among the nodes of all workers. Ranks of one node are consecutive."""
    num_nodes: int = 1
    node_folder: Path | None = None
    """Folder on the node's disk that exists before the node's workers start, belongs to this start of the workers
    alone, and is removed after it. None for a worker that no launcher has started.
    """


class Workers(Protocol):
    """A group of workers on the nodes that a launcher has for them."""

    def run(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any) -> None:
        """Start all workers, which can form a process group, and run `function(argument, environment)` in each.

        Returns when all workers have returned. Raises the `MillraceError` that a worker raised, or `WorkersLost`; when
        several workers failed, the error that made the others fail. May be called again after `WorkersLost`: then no
        process of the lost workers is left.
        """
        ...


class Launcher(Protocol):
    """Starts tasks, which are independent, and workers, which form a group."""

    def map_tasks(self, function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
        """Yield (index, function(item)) as tasks finish, with at most `num_workers` at a time.

        Tasks start in the order of `items`. At most `num_workers` items are taken before their tasks start, so that a
        sequence may make its items: memory grows with `num_workers` alone.

        `function` is importable and idempotent. A task whose process died runs again: Ray starts it once more, and
        `inline` raises `WorkersLost`, after which the same command can be run again.
        """
        ...

    def map_on_nodes(
        self, function: Callable[[T], R], items: Sequence[T], tasks_per_node: int
    ) -> Iterator[tuple[int, R]]:
        """Yield (index, function(item)) as tasks finish, with at most `tasks_per_node` at a time on each node that can
        run work of the stage, however busy the node is.

        It suits tasks that wait for a file system more than they compute, and that may run beside the stage's own work.
        `function` is importable and idempotent. Raises `WorkersLost` where a task's process or node is lost.
        """
        ...

    def keep_processes(self, num_workers: int) -> AbstractContextManager[None]:
        """Keep processes for the tasks of all `map_tasks` calls within the block, where a launcher can do so cheaply.

        Has to be called before the command has threads of its own.
        """
        ...

    def run_tasks(
        self, function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
    ) -> Generator[tuple[T, R | LostTask] | None, None, None]:
        """Run `function(item)` for the items that `take()` returns; it is called whenever a task can start.

        Yields (item, function(item)) as tasks end, and None about once a second meanwhile. A lost task yields a
        `LostTask` and runs again only if `take` returns its item once more. The generator ends when no task runs and
        `take` returns None; closing the generator kills the tasks that run.
        """
        ...

    def has_room(self, demand: TaskDemand) -> bool:
        """Whether one of the running nodes could hold a task with this demand if nothing else ran there."""
        ...

    def prepare(self, spec: WorkerGroupSpec) -> None:
        """Begin the slow part of starting these workers in the background; `open_workers` does what is left to do.

        Has to be called in the main thread. The caller need not start workers afterwards.
        """
        ...

    def map_nodes(self, function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
        """Run `function(item)` once on every node that can run work of the stage, however busy the node is.

        Yields (name of the node, function(item)) as the tasks end, with a `LostTask` for a node that does not answer
        within NODE_SECONDS.
        """
        ...

    def open_workers(self, spec: WorkerGroupSpec) -> AbstractContextManager[Workers]:
        """Give the group of workers that `spec` describes for the block, at whose end no process of them is left.

        Has to be called in the main thread.
        """
        ...


def run_workers(
    launcher: Launcher, function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec
) -> None:
    """Run `function(argument, environment)` in all workers that `spec` describes, once; see `Workers.run`."""
    with launcher.open_workers(spec) as workers:
        workers.run(function, argument)


def name_the_cause(raised: Sequence[BaseException], lost: str | None) -> BaseException:
    """Choose the one error that explains a failed group of workers. `lost` names a worker that died without an error.

    When one worker fails the others fail too, in the collective in which they wait for it. Such errors come last.
    """

    def rank(error: BaseException) -> int:
        if isinstance(error, WorkersLost):
            return 3
        if isinstance(error, HardwareFault):  # errors of other workers may be its consequence
            return -1
        if isinstance(error, MillraceError):
            return 0
        return 1 if isinstance(error, OSError) and not isinstance(error, ConnectionError) else 2

    first = min(raised, key=rank, default=None)
    if first is None or (lost is not None and rank(first) > 1):
        return WorkersLost(lost or "a worker was lost")
    return first


def choose_launcher(name: str) -> Launcher:
    """The launcher called `name`. Ray is imported for `ray` alone, so that `inline` runs where Ray is not installed."""
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))
