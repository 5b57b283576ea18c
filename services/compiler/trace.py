"""Drive the program through every phase a run has, in one process that stands for the whole topology.

The process is one rank of a group whose other ranks are fake: shapes and graphs are real, values are not.
`python -m services.compiler.trace FOLDER RANK` reads FOLDER/recipe.json, fills the cache directory that
its environment names, prints the name of every phase at its end and writes FOLDER/report.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

from services.common.process.entry_point import run_program
from services.common.program.backends.backend import Backend
from services.common.program.backends.choice import choose_backend
from services.common.program.mesh import Mesh, make_mesh
from services.common.program.micro_batch import make_synthetic_micro_batch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.schema import Recipe

MAX_MICRO_BATCHES = 2
"""Maximum number of micro-batches in a traced step: the third and later ones have the graphs of the second."""
PHASES = (
    *("first step", "second step", "third step", "save and resume", "step after resume", "evaluation"),
    "health measurement",
)


def main(argv: list[str]) -> int:
    folder = Path(argv[0])
    recipe = Recipe.model_validate_json((folder / "recipe.json").read_text(encoding="utf-8"))
    graphs_compiled = trace(recipe, tell=lambda phase: print(phase, flush=True), rank=int(argv[1]))
    (folder / "report.json").write_text(json.dumps({"graphs_compiled": graphs_compiled}), encoding="utf-8")
    return 0


def trace(recipe: Recipe, tell: Callable[[str], None], rank: int = 0) -> int:
    """Run PHASES as one rank of the recipe's workers, and call `tell` with the name of every phase at its end.

    Returns the number of graphs that the cache did not hold.
    """
    world_size = recipe.parallel.num_workers
    device = recipe.parallel.device
    choose_backend(device).world_collectives(device)  # torch has to know the device before a group names it
    group = ProcessGroup.fake(world_size, rank, device)
    backend = make_backend(recipe, make_mesh(recipe, rank, world_size))
    run_phases(recipe, backend, tell)
    group.leave()
    return backend.graphs_compiled()


def make_backend(recipe: Recipe, mesh: Mesh) -> Backend:
    """Make the recipe's backend in the form that traces.

    For Neuron, libneuronxla is configured to keep the graphs and to compile none. Where libneuronxla is not installed,
    torch_xla makes the graphs: they have the real number and sizes, but no device can use them.
    """
    threads, device = recipe.parallel.threads_per_worker, recipe.parallel.device
    if device == "xla":
        from services.common.program.backends.xla_environment import compiler_flags  # noqa: PLC0415 - for one device only
        from services.compiler.neuron_trace import KEEP_GRAPHS, KeptXla, TracedXla  # noqa: PLC0415

        if recipe.compile.trace_on == "cpu":
            is_kept = importlib.util.find_spec("libneuronxla") is not None
            return (KeptXla if is_kept else TracedXla)(mesh, threads, compiler_flags(recipe))
        os.environ.update(KEEP_GRAPHS)
    return choose_backend(device)(mesh, threads, recipe.train.reduction, device)


def run_phases(recipe: Recipe, backend: Backend, tell: Callable[[str], None]) -> None:
    """Run PHASES with synthetic tokens, and call `tell` with the name of every phase at its end."""
    program = Program(recipe, backend, draws_weights=False)
    num_micro_batches = min(len(backend.mesh.share(recipe.batch.num_micro_batches)), MAX_MICRO_BATCHES)
    batches = [make_synthetic_micro_batch(recipe) for _ in range(num_micro_batches)]
    for step in range(3):
        program.train_step(step, batches)
        tell(PHASES[step])
    program.state.is_finite()
    saved = {piece: tensor.clone() for piece, tensor in program.state.read().items()}
    with program.state.writing() as held:
        for piece, tensor in held.items():
            tensor.copy_(saved[piece])
    tell(PHASES[3])
    program.train_step(3, batches)
    tell(PHASES[4])
    program.evaluate(batches[0])
    tell(PHASES[5])
    program.measure_activations(batches[0])
    program.measure_squares(3, skipped_steps=0)
    tell(PHASES[6])


if __name__ == "__main__":
    run_program(main)
