"""Measures what a plan and its tasks cost where every request to a store takes time, without waiting for that time.

A store counts its requests. A launcher runs the tasks one after another, and books the requests of each task on the
worker of a cluster that would have run the task: the one that is free first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

T = TypeVar("T")
R = TypeVar("R")


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory, on which a list of a folder, a question about a file and an open are a request each."""

    protocol = "counting"
    # fsspec makes instances as it likes, and all of them have one store.
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[dict[str, int]] = {"ls": 0, "info": 0, "open": 0}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.requests["ls"] += 1
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.requests["info"] += 1
        name = self._strip_protocol(path)
        if name in self.store:  # MemoryFileSystem compares the path with those of all files first
            file = self.store[name]
            return {"name": name, "size": file.size, "type": "file", "created": file.created}
        return super().info(path, **options)

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.requests["open"] += 1
        return super()._open(path, *arguments, **options)

    @classmethod
    def count(cls) -> int:
        return sum(cls.requests.values())

    @classmethod
    def forget(cls) -> None:
        cls.requests.update(dict.fromkeys(cls.requests, 0))
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]


def register() -> CountingFileSystem:
    """Make `counting://` an address of an empty store, and return the store."""
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    CountingFileSystem.forget()
    made: CountingFileSystem = fsspec.filesystem("counting")
    return made


class VirtualLauncher:
    """Runs tasks in this process. `saved` is the number of requests for which nobody has to wait."""

    def __init__(self) -> None:
        self.saved = 0

    def map_tasks(self, function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
        free_at = [0] * num_workers
        total = 0
        for index, item in enumerate(items):
            before = CountingFileSystem.count()
            result = function(item)
            requests = CountingFileSystem.count() - before
            heapq.heapreplace(free_at, free_at[0] + requests)
            total += requests
            yield index, result
        self.saved += total - max(free_at)
