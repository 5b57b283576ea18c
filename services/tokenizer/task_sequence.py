"""Tasks that are made when they start, so that a million of them take no memory, and the order in which they start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress

T = TypeVar("T")
R = TypeVar("R")


class TaskSequence(Sequence[T]):
    """Tasks 0 to `num_tasks` - 1, each of which `make_task(number)` makes anew."""

    def __init__(self, num_tasks: int, make_task: Callable[[int], T]) -> None:
        self._numbers = range(num_tasks)
        self._make_task = make_task

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._make_task(number) for number in self._numbers[index]]
        return self._make_task(self._numbers[index])


def map_largest_first(
    launcher: Launcher,
    function: Callable[[T], R],
    tasks: Sequence[T],
    sizes: npt.NDArray[np.int64],
    num_workers: int,
) -> Iterator[tuple[int, R]]:
    """Yield (index, function(tasks[index])) as tasks finish. Tasks start in falling order of their sizes.

    So the largest task, such as a compressed file that cannot be split, runs beside all others and not after them: the
    last task ends at most the largest one's time after the workers begin to idle, and mostly a small one's.
    """
    order: list[int] | npt.NDArray[Any] = np.argsort(-sizes, kind="stable")
    ordered = TaskSequence(len(tasks), lambda place: tasks[int(order[place])])
    for place, result in launcher.map_tasks(function, ordered, num_workers):
        yield int(order[place]), result


def run_largest_first(
    launcher: Launcher,
    function: Callable[[T], R],
    tasks: Sequence[T],
    sizes: npt.NDArray[np.int64],
    num_workers: int,
    *,
    title: str,
    unit: str,
) -> list[R]:
    """Run the tasks in falling order of their sizes, and return their results in the order of the tasks.

    The progress has the title, and counts the sizes in the unit.
    """
    results: dict[int, R] = {}
    done = 0
    with show_progress(title, int(sizes.sum()), unit) as progress:
        for index, result in map_largest_first(launcher, function, tasks, sizes, num_workers):
            results[index] = result
            done += int(sizes[index])
            progress.advance_to(done)
    return [results[index] for index in range(len(tasks))]
