"""Two ways to start work: `ray` (a Ray cluster, started in place when there is none) and `inline` (plain processes).

Both start the same functions with the same arguments, and both raise what the function raised.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from services.common.errors import HardwareFault, MillraceError, WorkersLost

T = TypeVar("T")
R = TypeVar("R")

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

# On a cluster a Ray node declares one unit of its stage's resource, of which the job that runs the stage's command
# takes a share: that places the driver, and leaves the rest to its workers.
STAGE_RESOURCE_PREFIX = "stage_"
DRIVER_SHARE = 0.01

NODE_SECONDS = 300.0
"""For a task of `Launcher.map_nodes`: a file system that hangs holds its node's task for ever."""


LAUNCHERS = {"ray": "services.common.launch.ray_launcher", "inline": "services.common.launch.inline"}


@dataclass(frozen=True)
class WorkerGroupSpec:
    """The processes that a launcher starts together."""

    num_workers: int
    threads_per_worker: int
    workers_per_node: int
    """At most, on a cluster."""
    shared_folder: Path
    """Where the launcher keeps its own files: every node sees it, no other command uses it, and they are gone when the
    workers have ended.
    """
    device: str = "cpu"
    """Of each worker, as a recipe names it. One on a NeuronCore is told which before its function is called."""
    logical_core_size: int | None = None
    """Physical NeuronCores that make one of a worker's, where the instance type leaves a choice."""
    preload: tuple[str, ...] = ()
    """Modules that the workers import in any case, and MODULE:FUNCTION for what they would do in any case. They leave
    no thread, and a function is told whether its process may fork.
    """


@dataclass(frozen=True)
class TaskDemand:
    """What a task takes of its node. A cluster places tasks by it; nothing holds a task to it."""

    num_cpus: int = 1
    memory_bytes: int = 0

    def count_on(self, cpus: float, memory_bytes: float) -> int:
        """Such tasks that a node of this size has room for at a time."""
        of_memory = [int(memory_bytes // self.memory_bytes)] if self.memory_bytes else []
        return min([int(cpus // self.num_cpus), *of_memory])


@dataclass(frozen=True)
class LostTask:
    """What became of a task whose process died before it returned."""

    reason: str
    is_out_of_memory: bool = False
    """Its node had to end it."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """Which of the workers of a run this process is, and where it meets the others."""

    rank: int
    world_size: int
    launch: str
    rendezvous: str = ""
    """`tcp://HOST:PORT`, or the path of a file that all workers see; of no use to one that is alone."""
    local_rank: int = 0
    """Among the workers of its node, which share its devices."""


class Launcher(Protocol):
    def map_tasks(self, function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
        """Yield (index, function(item)) as tasks finish, with at most `num_workers` at a time.

        `function` is importable and idempotent: a task whose process died runs again, by Ray or, after the
        `WorkersLost` that `inline` raises, by the next command.
        """
        ...

    def run_tasks(
        self, function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
    ) -> Generator[tuple[T, R | LostTask] | None, None, None]:
        """Run tasks of which the caller decides, whenever one can start, which is the next: what `take()` returns.

        Yields (item, function(item)) as tasks end, with a `LostTask` for one that was lost and is not run again unless
        `take` returns it once more, and None about once a second in between. Ends when none runs and `take` has none.
        Closing it ends the tasks that run.
        """
        ...

    def has_room(self, demand: TaskDemand) -> bool:
        """Could a node that is up hold a task with this demand, if nothing else ran there?"""
        ...

    def prepare(self, spec: WorkerGroupSpec) -> None:
        """Begin what takes long about starting such workers, while the caller does something else: `run_workers` does
        what was not begun. Called in the main thread, and before the caller knows that it will start any.
        """
        ...

    def map_nodes(self, function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
        """Yield (name of the node, function(item)) for every node that the stage's work may be placed on, as they end.

        What runs there already is no hindrance. A node that does not answer for NODE_SECONDS gives a `LostTask`.
        """
        ...

    def run_workers(
        self, function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec
    ) -> None:
        """Run `function(argument, environment)` in processes that can form a group.

        Returns when all returned. Raises the `MillraceError` that a worker raised, or `WorkersLost`; when several
        failed, what the others failed of.
        """
        ...

    def is_preemption_noticed(self) -> bool:
        """Asked inside a worker, by all workers equally often: is one of their nodes about to be taken away?"""
        ...


def name_the_cause(raised: Sequence[BaseException], lost: str | None) -> BaseException:
    """One error for a group of failed workers; `lost` says which one died without raising anything, if one did.

    When a worker fails the others fail too, in whatever they were waiting for it with: what they raise comes last.
    """

    def rank(error: BaseException) -> int:
        if isinstance(error, WorkersLost):
            return 3
        if isinstance(error, HardwareFault):  # what its peers raise may be a consequence
            return -1
        if isinstance(error, MillraceError):
            return 0
        return 1 if isinstance(error, OSError) and not isinstance(error, ConnectionError) else 2

    first = min(raised, key=rank, default=None)
    if first is None or (lost is not None and rank(first) > 1):
        return WorkersLost(lost or "a worker was lost")
    return first


def choose_launcher(name: str) -> Launcher:
    """The launcher called `name`; Ray is imported when it is the one asked for, so `inline` never needs it."""
    return cast(Launcher, importlib.import_module(LAUNCHERS[name]))
