"""Programs of the workers in the tests on Trainium; `python -m tests.hardware.work NAME FOLDER` starts TorchNeuron's.

That process is a new one for each device: torch keeps a device until its process ends, and workers are forked from a
process that has found its packages. FOLDER has a `Case` in case.json, and gets the results, a file for each rank.
"""

from __future__ import annotations

import importlib
import json
import os
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
from services.common.program.tests.work import PARALLEL, degrees, joined, own_folder, train_on
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

    @classmethod
    def read(cls, folder: Path) -> Case:
        return cls(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def main(name: str, folder: Path) -> None:
    case = Case.read(folder)
    spec = WorkerGroupSpec(case.num_workers, 1, case.num_workers, folder, case.device)
    run_workers(inline, {"collectives": run_collectives, "steps": run_steps}[name], folder, spec)


def run_collectives(folder: Path, environment: WorkerEnvironment) -> None:
    """Run every collective along each axis, eager and compiled, and write the names of those with a wrong result."""
    case = Case.read(folder)
    mesh = Mesh(environment.rank, case.data_parallel_size, case.tensor_parallel_size, case.key_value_copies)
    with joined(folder, environment, case.device) as results:
        backend = choose_backend(case.device)(mesh, 1, "fast", case.device, environment.local_rank)
        results |= {"done": [], "wrong": []}
        for axis, dtype in ((axis, dtype) for axis in AXES if mesh.size(axis) > 1 for dtype in DTYPES):
            for name, (run, expected) in _collectives(backend, axis, mesh.group(axis), mesh.rank, dtype).items():
                for mode, function in (("eager", run), ("compiled", backend.compile(run))):
                    found = backend.to_host(function(backend.place(_numbers_of(mesh.rank, dtype))))
                    called = f"{mode} {name} along {axis} in {dtype}"
                    results["done"].append(called)
                    if not torch.equal(found, expected):
                        numbers = f"{found.flatten()[:4].tolist()} for {expected.flatten()[:4].tolist()}"
                        results["wrong"].append(f"{called}: {numbers}")


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
    case, own = Case.read(folder), own_folder(folder, environment)
    sizes = degrees(case.data_parallel_size, case.tensor_parallel_size)
    overrides = {"parallel__device": case.device, **sizes, **case.overrides}
    mesh = make_mesh(make_recipe(own, **(PARALLEL | overrides)), environment.rank, case.num_workers)
    with joined(folder, environment, case.device) as results:
        results.update(train_on(mesh, own, case.steps, environment.local_rank, **overrides))
        results["fallbacks"] = _fallbacks(case.device)


def _fallbacks(device: Device) -> list[str]:
    """Return the operations that TorchNeuron ran on the CPU, which the stand-in does not report."""
    report: Any = (
        getattr(importlib.import_module("torch_neuronx"), "get_fallback_ops", None) if device != "cpu" else None
    )
    return sorted(map(str, report())) if report else []


def open_core(folder: Path, environment: WorkerEnvironment) -> None:
    """Open this worker's core; writes the changed environment variables and torch_xla's view of the core to a file."""
    before = dict(os.environ)
    torch_xla = importlib.import_module("torch_xla")
    core = str(torch_xla.device())
    runtime = importlib.import_module("torch_xla.runtime")
    found = {
        "core": core,
        "kind": runtime.device_type(),
        "processes": runtime.process_count(),
        "index": runtime.process_index(),
        "devices": runtime.global_device_count(),
        "changed": {name: [was, os.environ.get(name)] for name, was in before.items() if os.environ.get(name) != was},
    }
    (folder / f"{environment.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
