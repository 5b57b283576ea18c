"""Fixtures for tests on this machine's NeuronCores or GPUs, where every worker is a process with its own device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.common.hardware.instance_types import GIB, InstanceType
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.recipe.derived import causal_flops_per_token
from services.common.recipe.memory_estimate import memory_of_worker
from services.common.testing.commands import run_python
from services.common.testing.recipes import load_with
from services.trainer.job import Job
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.supervision.supervise import train_on_node
from services.trainer.tests.builders import building_jobs, make_corpus
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
    words = ["-m", *f"services.{command}".split(), "--recipe", str(recipe), "--root", str(root), *options]
    done = run_python(words, TMPDIR=str(root.parent))
    assert done.returncode == 0, f"{command} {options}\n{done.stdout}"
    return done.stdout


def train_shipped(path: str, folder: Path, node: InstanceType, **overrides: str) -> None:
    """Compile and train a shipped recipe with overrides, and print the plan and the speed."""
    recipe, root = REPOSITORY / path, folder / "fsx"
    overrides |= {"train__evaluation_tokens": "0", "checkpoint__interval_steps": "1000"}
    loaded = load_with(recipe, **overrides)
    make_corpus(root, loaded, kind="tiktoken")
    options = [f"--{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    run_stage("compiler", recipe, root, *options)
    run_stage("trainer", recipe, root, "--launch=inline", "--compile.require_warm=true", *options)

    [run] = [each for each in (root / "run").iterdir() if each.is_dir()]
    records = read_metrics(run)
    assert records
    assert all(math.isfinite(record["loss"]) for record in records)
    workers = loaded.parallel.num_workers
    node = node.divided_for(workers)
    tokens_per_second = records[-1]["mean_tokens_per_second"]
    utilization = tokens_per_second * causal_flops_per_token(loaded) / (workers * node.worker_peak_flops_per_second)
    print(f"\n{tokens_per_second:,.0f} tokens/s on {workers} cores, {utilization:.1%} of their peak")
    expected, core = memory_of_worker(loaded).peak_bytes / GIB, node.worker_memory_bytes / GIB
    print(f"`plan` expects {expected:.2f} GiB of each core's {core:.0f}")


def read_added_graphs(root: Path) -> list[tuple[int, int]]:
    """Return for each attempt how many graphs it compiled, and how many files it added to the compile cache."""
    [run] = [each for each in (root / "run").iterdir() if each.is_dir()]
    return [(attempt["graphs_compiled"], attempt["new_cache_files"]) for attempt in read_attempts(run)]
