"""Counts in a worker what its part in the group of all workers takes, whatever the worker computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.trainer.agreement.step_agreement import StepAgreement, WorkerStep
from services.trainer.tests.work import place_on_nodes
from services.trainer.workers.worker import joined_group

WORKERS_OF_NODE = 4
FileStore = dist.FileStore  # type: ignore[attr-defined]


class CountingStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store in a file, which counts the bytes of keys and values that this worker writes and reads."""

    def __init__(self, path: str, world_size: int) -> None:
        super().__init__()
        self._store = FileStore(path, world_size)
        self.bytes = 0

    def set(self, key: str, value: Any) -> None:
        self.bytes += len(key) + len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self.bytes += len(key) + len(value)
        return value

    def add(self, key: str, number: int) -> int:
        self.bytes += len(key) + 8
        return int(self._store.add(key, number))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.bytes += sum(map(len, keys))
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count_group_costs(folder: Path, environment: WorkerEnvironment) -> None:
    """Write the bytes that went through the store and the descriptors that are open in the middle of a run."""
    stores: list[CountingStore] = []

    def make_store(path: str, world_size: int) -> CountingStore:
        stores.append(CountingStore(path, world_size))
        return stores[-1]

    pytest.MonkeyPatch().setattr(dist, "FileStore", make_store)
    before = count_descriptors()
    placed = place_on_nodes(environment, environment.world_size // WORKERS_OF_NODE)
    with joined_group(placed) as group:
        agreement = StepAgreement(group)
        group.gather(group.rank)
        for _ in range(3):
            agreement.begin(WorkerStep(StopReason.NONE, written_step=1))
            assert agreement.finish().is_applied_by_some
        counts = {"store bytes": stores[0].bytes, "descriptors": count_descriptors() - before}
        (folder / f"{environment.rank}.json").write_text(json.dumps(counts), encoding="utf-8")
