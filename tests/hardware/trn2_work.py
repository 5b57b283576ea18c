"""Programs of the workers in the tests by TorchNeuron; `python -m tests.hardware.trn2_work NAME FOLDER` starts them.

That process is a new one for each device: torch keeps a device until its process ends, and workers are forked from a
process that has found its packages. FOLDER has a `Case` in case.json, and gets the results, a file for each rank.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.program.backends.backend import Backend
from services.common.program.backends.choice import choose_backend
from services.common.program.mesh import AXES, Axis, Mesh, make_mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.recipe.schema import Device
from services.common.testing.recipes import make_recipe

ELEMENTS = 256
"""Elements of a tensor that a collective gets: as many for each of 64 workers."""
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A device, a layout of workers on one node, and overrides of the small recipe."""

    device: Device
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    key_value_copies: int = 1
    """Copies of each key-value head in the mesh of `run_collectives`; in a recipe they follow from its model."""
    steps: int = 1
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(name: str, folder: Path) -> None:
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    spec = WorkerGroupSpec(case.num_workers, 1, case.num_workers, folder, case.device)
    run_workers(inline, {"collectives": run_collectives, "steps": run_steps}[name], folder, spec)


def run_collectives(folder: Path, environment: WorkerEnvironment) -> None:
    """Run every collective along each axis, eager and compiled, and write the names of those with a wrong result."""
    case = _read(folder)
    group = _join(case, environment)
    mesh = Mesh(environment.rank, case.data_parallel_size, case.tensor_parallel_size, case.key_value_copies)
    backend = choose_backend(case.device)(mesh, 1, "fast", case.device, environment.local_rank)
    wrong, done = [], []
    for axis in (axis for axis in AXES if mesh.size(axis) > 1):
        [peers] = [ranks for ranks in mesh.groups(axis) if environment.rank in ranks]
        for dtype in DTYPES:
            for name, (run, expected) in _collectives(backend, axis, peers, environment.rank, dtype).items():
                for mode, function in (("eager", run), ("compiled", backend.compile(run))):
                    found = backend.to_host(function(backend.place(_numbers_of(environment.rank, dtype))))
                    done.append(f"{mode} {name} along {axis} in {dtype}")
                    if not torch.equal(found, expected):
                        wrong.append(
                            f"{done[-1]}: {found.flatten()[:4].tolist()} for {expected.flatten()[:4].tolist()}"
                        )
    (folder / f"{environment.rank}.json").write_text(json.dumps({"done": done, "wrong": wrong}), encoding="utf-8")
    group.barrier()
    group.leave()


def _collectives(
    backend: Backend, axis: Axis, peers: list[int], rank: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return each collective of the program and what this rank gets from it."""
    parts = [_numbers_of(peer, dtype) for peer in peers]
    total = torch.stack(parts).sum(0)
    return {
        "sum": (partial(backend.all_reduce, axis=axis), total),
        "max": (partial(backend.all_reduce, axis=axis, op="max"), torch.stack(parts).amax(0)),
        "gather": (partial(backend.all_gather, axis=axis), torch.cat(parts)),
        "scatter": (partial(backend.reduce_scatter, axis=axis), total.chunk(len(peers))[peers.index(rank)]),
    }


def _numbers_of(rank: int, dtype: torch.dtype) -> Tensor:
    """Return a worker's tensor, whose sums over 64 workers are exact in bfloat16."""
    return ((torch.arange(ELEMENTS) + rank) % 3).to(dtype)


def run_steps(folder: Path, environment: WorkerEnvironment) -> None:
    """Train the small recipe for some steps, and write this rank's losses and state, and what fell back to the CPU."""
    case = _read(folder)
    group = _join(case, environment)
    own = folder / str(environment.rank)
    own.mkdir()
    sizes = {"parallel__data_parallel_size": f"{case.data_parallel_size}"}
    sizes["parallel__tensor_parallel_size"] = f"{case.tensor_parallel_size}"
    recipe = make_recipe(own, parallel__device=case.device, **sizes, **case.overrides)
    mesh = make_mesh(recipe, environment.rank, case.num_workers)
    backend = choose_backend(case.device)(mesh, 1, recipe.train.reduction, case.device, environment.local_rank)
    program, numbers = Program(recipe, backend), dict[str, list[float]](loss=[], gradient_norm=[])
    for step in range(case.steps):
        batches = micro_batches_of(recipe, step)
        result = program.train_step(step, [batches[n] for n in mesh.share(len(batches))])
        values = backend.read(result._asdict())
        for name, found in numbers.items():
            found.append(values[name])
    own_batches = batches[mesh.index("data") :: mesh.data_parallel_size]
    losses = torch.cat([backend.to_host(program.evaluate(batch)) for batch in own_batches])
    numbers["losses of targets"] = losses.flatten().tolist()
    state = {piece.key: tensor.clone() for piece, tensor in program.state.start_snapshot()().items()}
    torch.save({"numbers": numbers, "state": state, "fallbacks": _fallbacks(case.device)}, folder / f"{own.name}.pt")
    group.barrier()
    group.leave()


def _fallbacks(device: Device) -> list[str]:
    """Return the operations that TorchNeuron ran on the CPU, which the stand-in does not report."""
    report: Any = (
        getattr(importlib.import_module("torch_neuronx"), "get_fallback_ops", None) if device != "cpu" else None
    )
    return sorted(map(str, report())) if report else []


def _read(folder: Path) -> Case:
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def _join(case: Case, environment: WorkerEnvironment) -> ProcessGroup:
    world = choose_backend(case.device).world_collectives(case.device)
    return ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous, world)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
