"""A worker's store traffic and descriptors in the group of all workers do not grow with the number of workers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.trainer.tests.group_costs import count_group_costs


def costs_of(num_workers: int, folder: Path) -> dict[str, float]:
    """Return the mean store bytes and descriptors of a worker."""
    folder.mkdir()
    spec = WorkerGroupSpec(num_workers, 1, num_workers, folder, preload=("torch", "services.trainer.tests.group_costs"))
    run_workers(inline, count_group_costs, folder, spec)
    total: Counter[str] = Counter()
    counted = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    for each in counted:
        total.update(each)
    assert len(counted) == num_workers
    return {name: number / num_workers for name, number in total.items()}


@pytest.mark.parametrize(
    "sizes", [(8, 16), pytest.param((16, 32, 64), marks=pytest.mark.slow)], ids=["16 workers", "64 workers"]
)
def test_store_bytes_and_descriptors_of_a_worker_do_not_grow_with_the_workers(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    costs = [costs_of(size, tmp_path / str(size)) for size in sizes]

    for name in ("store bytes", "descriptors"):
        assert costs[-1][name] < 1.1 * costs[0][name], costs
