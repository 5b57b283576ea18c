"""Programs of a measurement's workers, in a module that other processes import."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh, make_mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.schema import Recipe

Seconds = dict[str, list[float]]
"""Seconds of every round, by row."""


@dataclass(frozen=True)
class Measurement:
    folder: Path
    recipes: dict[str, Recipe]
    """Recipe of every row."""
    rounds: int
    num_elements: int = 0


def measure_steps(measurement: Measurement, environment: WorkerEnvironment) -> None:
    """Write the seconds of a train step under every recipe; the recipes take turns in every round."""
    group = ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous)
    steps = {name: _step_of(recipe, environment) for name, recipe in measurement.recipes.items()}
    _write(measurement, environment, _measure(group, steps, measurement.rounds))
    group.leave()


def measure_sums(measurement: Measurement, environment: WorkerEnvironment) -> None:
    """Write the seconds of a sum over all workers, by both reductions."""
    group = ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous)
    mesh = Mesh(environment.rank, data_parallel_size=environment.world_size)
    backends = {reduction: TorchNative(mesh, 1, reduction) for reduction in ("exact", "fast")}
    gradient = torch.randn(measurement.num_elements)  # in memory that the backend replaces

    def sum_of(backend: TorchNative) -> Callable[[], object]:
        return lambda: backend.all_reduce(gradient, "data")

    sums = {reduction: sum_of(backend) for reduction, backend in backends.items()}
    _write(measurement, environment, _measure(group, sums, measurement.rounds))
    group.leave()


def _step_of(recipe: Recipe, environment: WorkerEnvironment) -> Callable[[], object]:
    mesh = make_mesh(recipe, environment.rank, environment.world_size)
    backend = TorchNative(mesh, recipe.parallel.threads_per_worker, recipe.train.reduction)
    program = Program(recipe, backend)
    shape = (recipe.batch.micro_batch_size, recipe.corpus.sequence_length + 1)
    batches = [
        MicroBatch(torch.randint(recipe.model.vocab_size, shape, generator=torch.Generator().manual_seed(index)))
        for index in mesh.share(recipe.batch.num_micro_batches)
    ]
    return lambda: backend.defer(program.train_step(0, batches)._asdict()).read()


WARM_UP_ROUNDS = 8
"""Number of rounds before the measurement: until a worker's allocator holds enough memory, a sum takes three times as
long.
"""


def _measure(group: ProcessGroup, rows: dict[str, Callable[[], object]], rounds: int) -> Seconds:
    seconds: Seconds = {name: [] for name in rows}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, run in rows.items():
            group.barrier()
            started = time.perf_counter()
            run()
            group.barrier()
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _write(measurement: Measurement, environment: WorkerEnvironment, seconds: Seconds) -> None:
    if environment.rank == 0:
        (measurement.folder / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
