"""Fixtures for tests on this machine's NeuronCores or GPUs, where every worker is a process with its own device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.trainer.job import Job
from services.trainer.supervision.supervise import train_on_node
from services.trainer.tests.builders import building_jobs

NEURON_DEVICES = sorted(Path("/dev").glob("neuron[0-9]*"))
CORES_OF_A_DEVICE = 2  # on trn1

ON_XLA = {
    "parallel__device": "xla",
    "train__reduction": "fast",
    "compile__enabled": "true",
    "parallel__data_parallel_size": "1",
}
"""Overrides with which the small recipe has one worker, on a NeuronCore."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = {}
    if not NEURON_DEVICES:
        absent["neuron"] = "no /dev/neuron0: this machine or container has no Neuron device"
    if torch.cuda.device_count() == 0:
        absent["cuda"] = "torch finds no GPU"
    for item in items:
        for name, reason in absent.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that builds a job on a corpus; overrides are written `train__max_steps="7"`."""
    with building_jobs(tmp_path) as build:
        yield build


def train_with_workers(job: Job) -> None:
    """Train as `python -m services.trainer --launch inline` does, without the supervisor."""
    parallel = job.recipe.parallel
    workers = parallel.num_workers
    spec = WorkerGroupSpec(workers, parallel.threads_per_worker, workers, job.run_folder, parallel.device)
    run_workers(inline, train_on_node, job, spec)
