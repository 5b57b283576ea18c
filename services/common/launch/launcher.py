"""Two ways to start work: `ray` (a Ray cluster, started in place when there is none) and `inline` (plain processes).

Both start the same functions with the same arguments, and both raise what the function raised.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class WorkerEnvironment:
    """Which of the workers of a run this process is."""

    rank: int
    world_size: int
    launch: str


class Launcher(Protocol):
    def map_tasks(self, function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
        """Yield (index, function(item)) as tasks finish, with at most `num_workers` at a time.

        `function` is importable and idempotent: a task whose process died runs again.
        """
        ...

    def run_workers(
        self,
        function: Callable[[Any, WorkerEnvironment], None],
        argument: Any,
        num_workers: int,
        threads_per_worker: int,
    ) -> None:
        """Run `function(argument, environment)` in `num_workers` processes that can form a process group.

        Returns when all returned. Raises the `MillraceError` that a worker raised, or `WorkersLost`.
        """
        ...

    def is_preemption_noticed(self) -> bool:
        """Asked inside a worker, by all workers equally often: is one of their nodes about to be taken away?"""
        ...


def choose_launcher(name: str) -> Launcher:
    """The launcher called `name`; Ray is imported when it is the one asked for, so `inline` never needs it."""
    return cast(Launcher, importlib.import_module(f"services.common.launch.{name}"))
