"""Describes the two launchers: `inline` starts processes of this machine, `ray` starts processes on a Ray cluster.

Both run the same functions with the same arguments, and both raise the exception that a function raised.
"""

from __future__ import annotations

import importlib
import pickle  # nosec B403 # only this process's own objects are pickled
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from services.common.errors import HardwareFault, MillraceError, WorkersLost
from services.common.launch.cluster_address import choose_interface

T = TypeVar("T")
R = TypeVar("R")

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# On a cluster every Ray node declares one unit of its stage's resource. The driver takes DRIVER_SHARE of that unit,
# which places the driver on a node of the stage, and leaves the rest to the workers.
STAGE_RESOURCE_PREFIX = "stage_"
DRIVER_SHARE = 0.01

NODE_SECONDS = 300.0
"""Seconds in which a task of `Launcher.map_nodes` has to end: a file system that hangs would hold it for ever."""

RAY, INLINE = "ray", "inline"
"""Name of the launcher whose workers are on the nodes of a Ray cluster, and of that whose workers are all here."""
LAUNCHERS = {RAY: "services.common.launch.ray_launcher", INLINE: "services.common.launch.inline"}


@dataclass(frozen=True)
class WorkerGroupSpec:
    """Describes the worker processes that a launcher starts together."""

    num_workers: int
    threads_per_worker: int
    workers_per_node: int
    """Largest number of workers on a node of a cluster."""
    shared_folder: Path
    """Folder for the launcher's own files, which every node sees and no other command uses."""
    device: str = "cpu"
    """Device of every worker, as a recipe names it. A worker knows its NeuronCore before its function is called."""
    logical_core_size: int | None = None
    """Physical NeuronCores in the logical core of a worker, where the instance type leaves a choice (Neuron's LNC)."""
    preload: tuple[str, ...] = ()
    """Modules. On Linux workers are forked from a process that has imported them, so none may leave a thread."""
    kept_folder: str = ""
    """Name of a folder in TMPDIR that each node removes after the last start of the workers."""

    def workers_of(self, node_rank: int, num_nodes: int) -> int:
        """Number of workers on a node. Only one node may have fewer workers than the others."""
        size = self.num_workers if num_nodes == 1 else self.workers_per_node
        return min(size, self.num_workers - node_rank * size)


class Node(NamedTuple):
    """A node's place among the nodes of a group."""

    rank: int = 0
    num_nodes: int = 1
    address: str = LOOPBACK_ADDRESS
    """Address at which the other nodes reach this one."""
    loss: str = ""
    """What was lost, where this is not the first start of these workers."""


ONLY_NODE = Node()


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
    """`tcp://HOST:PORT/START`, or the path of a file that all workers see. A single worker does not use it."""
    local_rank: int = 0
    """Rank of the worker among those of its node, which share the node's devices."""
    local_world_size: int = 1
    """Number of workers on the worker's node."""
    node_rank: int = 0
    """Rank of the worker's node among the nodes of all workers. Ranks of one node are consecutive."""
    start_number: int = 0
    """Number of the workers' start, as `WorkerGroup.restart_policy` has given it."""
    started_at: float = 0.0
    """`time.time()` of that decision, by the clock of the node that made it."""


class TrainingReport(NamedTuple):
    """What workers have reached, for the API and the metrics of the launcher's cluster."""

    metrics: dict[str, float]
    checkpoint: Path | None
    """Folder of the newest committed checkpoint."""


def start_once(loss: str) -> int:
    """Start workers that are not started again: raise `WorkersLost` after a loss."""
    if loss:
        raise WorkersLost(loss)
    return 0


def nothing() -> None:
    """Neither report nor stop."""


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that run a function together. Other nodes get a copy of all of it, by pickle."""

    work: bytes
    """The pickled function of the workers and its argument. Only workers load them, because loading imports modules."""
    spec: WorkerGroupSpec
    restart_policy: Callable[[str], int] = start_once
    """Called before each start of the workers with what was lost, and with "" before the first. Returns a number that
    no other start has, or raises the error with which the group ends. It runs on the node with torch's group rank 0.
    """
    name: str = "workers"
    """Name of the run on the launcher's cluster."""
    storage_path: Path | None = None
    """Folder with the folder of the run's checkpoints, which has the run's name; without one, the shared folder."""
    max_node_losses: int = 0
    """Losses of nodes, and of the processes that start workers there, after which a cluster restarts the group."""
    read_report: Callable[[], TrainingReport | None] = nothing
    """Called on node 0 every ten seconds and at the end, for what a cluster's API and metrics show."""
    stop: Callable[[], None] = nothing
    """Asks the workers to stop; called on node 0 when one of their nodes is about to be taken away."""


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

    def map_nodes(self, function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
        """Run `function(item)` once on every node that can run work of the stage, however busy the node is.

        Yields (name of the node, function(item)) as the tasks end, with a `LostTask` for a node that does not answer
        within NODE_SECONDS.
        """
        ...

    def run_workers(self, group: WorkerGroup) -> None:
        """Start all workers of a group, which can form a process group, and run its function in each.

        Returns when all workers have returned. Where a worker or a node is lost, all workers start again as
        `group.restart_policy` decides. Raises the error of `restart_policy`, and the fatal error, one that is not
        `WorkersLost`, of the first worker that has one; then no process of the workers is left. Has to be called in the
        main thread.
        """
        ...


def run_workers(
    launcher: Launcher, function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec
) -> None:
    """Run `function(argument, environment)` in all workers that `spec` describes, once; see `Launcher.run_workers`."""
    launcher.run_workers(WorkerGroup(pickle.dumps((function, argument)), spec))


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
    if name != INLINE:
        choose_interface()
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))
