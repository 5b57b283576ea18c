"""Fixtures for tests on this machine's NeuronCores or GPUs, where every worker is a process with its own device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.trainer.job import Job
from services.trainer.metrics.records import read_attempts
from services.trainer.supervision.supervise import train_on_node
from services.trainer.tests.builders import building_jobs
from services.trainer.tests.runs import REPOSITORY

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


def run_stage(command: str, recipe: Path, root: Path, *options: str) -> str:
    """Run a stage, or a subcommand of one, to its end with 0, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *f"services.{command}".split(), "--recipe", recipe, "--root", root, *options],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(root.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} {options}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def read_added_graphs(root: Path) -> list[tuple[int, int]]:
    """Return for each attempt how many graphs it compiled, and how many files it added to the compile cache."""
    [run] = [each for each in (root / "run").iterdir() if each.is_dir()]
    return [(attempt["graphs_compiled"], attempt["new_cache_files"]) for attempt in read_attempts(run).lines]
