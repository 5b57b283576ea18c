"""Tasks of all phases: their order, the files that they write, and markers of finished tasks.

A task writes its files and last a marker: the JSON of its result, which has the checksums of the files. A repeated
command runs no task whose marker fits its files.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import ManifestModel
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress

NUMBERS_PER_FOLDER = 1_000
TEMPORARY_SUFFIX = ".tmp"

T = TypeVar("T")
R = TypeVar("R")
M = TypeVar("M", bound=ManifestModel)


class TaskSequence(Sequence[T]):
    """Tasks 0 to `num_tasks` - 1, which `make_task(number)` makes when they start: a million of them take no memory."""

    def __init__(self, num_tasks: int, make_task: Callable[[int], T]) -> None:
        self._numbers, self._make_task = range(num_tasks), make_task

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._make_task(self._numbers[index])


def map_largest_first(
    launcher: Launcher,
    function: Callable[[T], R],
    tasks: Sequence[T],
    sizes: npt.NDArray[np.int64],
    num_workers: int,
) -> Iterator[tuple[int, R]]:
    """Yield (index, function(tasks[index])) as tasks finish. The largest task starts first, beside all others."""
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
    """Run the tasks as `map_largest_first` does, with progress by sizes. Return results in the order of the tasks."""
    results: dict[int, R] = {}
    done = 0
    with show_progress(title, int(sizes.sum()), unit) as progress:
        for index, result in map_largest_first(launcher, function, tasks, sizes, num_workers):
            results[index] = result
            done += int(sizes[index])
            progress.advance_to(done)
    return [results[index] for index in range(len(tasks))]


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename it to `path` when the block ends: `path` is complete or absent.

    It is not synced, which would take a fifth of the stage's time: scratch is compared with its checksums before use.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def map_array(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map a file as an array, also an empty file, which Linux does not map."""
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


def path_in_tree(root: Path, number: int, suffix: str) -> Path:
    """Return the path of a numbered file: number 12,345 is `012/012345` and the suffix. The writer makes its folder."""
    return root / f"{number // NUMBERS_PER_FOLDER:03d}" / f"{number:06d}{suffix}"


def read_marker(path: Path, result_type: type[M], checksums: Callable[[M], Mapping[Path, str]]) -> M | None:
    """Return the result in the marker at `path`, or None when it is missing, of another form, or a file is damaged.

    `checksums` returns the checksum of each file for the result.
    """
    try:
        result = result_type.model_validate_json(path.read_bytes())
        is_whole = all(xxh3_of(file) == checksum for file, checksum in checksums(result).items())
    except (FileNotFoundError, ValidationError):
        return None
    return result if is_whole else None


def write_marker(path: Path, result: ManifestModel) -> None:
    """Write a task's result to `path`, after all files of the task."""
    with write_file(path) as file:
        file.write(result.model_dump_json().encode())
