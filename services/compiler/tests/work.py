"""Programs of the workers in the compiler's tests, in a module that other processes import."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from services.common.artifacts.files import list_files
from services.common.errors import WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import make_mesh
from services.common.program.micro_batch import MicroBatch, make_synthetic_micro_batch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.common.testing.waiting import wait_until
from services.compiler import trace

R = TypeVar("R")

GRAPHS_VARIABLE = "MILLRACE_TEST_GRAPHS"


@dataclass(frozen=True)
class Gang:
    folder: Path
    backend: type[TorchNative]
    recipe: Recipe
    """Recipe whose graphs rank 0 traces, and which all workers start to train."""
    fewer: Recipe
    """Recipe of a smaller topology, with which the first workers continue."""

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


class GraphKeeper(TorchNative):
    """Native backend that writes every graph to a file as text, and runs its operations without Inductor.

    Inductor's output depends on the graph alone, and takes the C++ compiler a second per loop.
    """

    _graphs_compiled = 0

    @staticmethod
    def cache_environment(folder: Path, recipe: Recipe) -> dict[str, str]:
        return {GRAPHS_VARIABLE: str(folder)}

    def compile(self, function: Callable[..., R], is_dynamic: bool = False) -> Callable[..., R]:
        return torch.compile(function, backend=aot_autograd(fw_compiler=self._keep), dynamic=is_dynamic, fullgraph=True)

    def graphs_compiled(self) -> int:
        return self._graphs_compiled

    def require_warm_cache(self) -> None:
        pass  # a failed test then shows all missed graphs, not the first alone

    def _keep(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        text = graph.print_readable(print_output=False)
        file = Path(os.environ[GRAPHS_VARIABLE], hashlib.sha256(text.encode()).hexdigest())
        if not file.exists():
            self._graphs_compiled += 1
            file.write_text(text, encoding="utf-8")
        return make_boxed_func(graph.forward)


def trace_then_train(gang: Gang, environment: WorkerEnvironment) -> None:
    """Let rank 0 fill the cache as the compiler stage does, then train with it on all workers.

    Every worker writes the number of graphs that the cache lacked, at its start and at its resumption.
    """
    rank = environment.rank
    os.environ.update(gang.backend.cache_environment(gang.cache, gang.recipe))
    if rank == 0:
        pytest.MonkeyPatch().setattr(trace, "choose_backend", lambda device: gang.backend)
        trace.trace(gang.recipe, tell=lambda phase: None)
        torch._dynamo.reset()
        partial = gang.folder / "traced.partial"
        partial.write_text(json.dumps(list_files(gang.cache)), encoding="utf-8")
        partial.rename(gang.folder / "traced.json")
    wait_until((gang.folder / "traced.json").exists, 300)
    missed = {"started": start(gang, environment)}
    if rank < gang.fewer.parallel.num_workers:
        missed["resumed"] = resume(gang, environment)
    (gang.folder / f"missed-{rank}.json").write_text(json.dumps(missed), encoding="utf-8")


def start(gang: Gang, environment: WorkerEnvironment) -> int:
    """Take a step, an evaluation and a health measurement; returns the number of graphs that the cache lacked."""
    group = ProcessGroup.join(environment.rank, environment.world_size, environment.rendezvous)
    program, share = make_program(gang, gang.recipe, environment.rank)
    program.train_step(0, share)
    program.evaluate(share[0])
    program.measure_health(0, 0, True, share)
    group.barrier()
    group.leave()
    return program.backend.graphs_compiled()


def resume(gang: Gang, environment: WorkerEnvironment) -> int:
    """Take a step from a loaded state; returns the number of graphs that the cache lacked.

    Rank 1 then ends without leaving the group, which rank 0 notices in a collective of its next step's graph.
    """
    rank = environment.rank
    group = ProcessGroup.join(rank, gang.fewer.parallel.num_workers, environment.rendezvous + "-again")
    program, share = make_program(gang, gang.fewer, rank)
    with program.state.writing() as held:
        for tensor in held.values():
            tensor.copy_(torch.zeros_like(tensor))
    program.train_step(7, share)
    program.measure_health(7, 0, True, share)
    group.barrier()
    missed = program.backend.graphs_compiled()
    if rank == 0:
        with pytest.raises(WorkersLost):
            program.train_step(8, share)
    group.leave()
    return missed


def make_program(gang: Gang, recipe: Recipe, rank: int) -> tuple[Program, list[MicroBatch]]:
    """Make the program of a worker, and the micro-batches of the worker's share of a step."""
    backend = gang.backend(make_mesh(recipe, rank, recipe.parallel.num_workers), 1, recipe.train.reduction)
    backend.require_warm_cache()
    share = [make_synthetic_micro_batch(recipe) for _ in backend.mesh.share(recipe.batch.num_micro_batches)]
    return Program(recipe, backend), share
