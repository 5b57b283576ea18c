"""What the tests let workers do; importable, so that other processes find it."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import AXES, Mesh
from services.common.program.worker_group import WorkerGroup

WORKERS = 4


def part_of(rank: int) -> torch.Tensor:
    """What a worker brings: [8, 3], with magnitudes far apart, so that every order of additions has bits of its own."""
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)


def run_collectives(folder: Path, environment: WorkerEnvironment) -> None:
    """Leave what every collective along both axes of a mesh of 2 x 2 gives this worker, with either reduction."""
    rank = environment.rank
    group = WorkerGroup.join(rank, environment.world_size, environment.rendezvous)
    mesh = Mesh(rank, data_parallel_size=2, tensor_parallel_size=2)
    results: dict[str, torch.Tensor] = {}
    for reduction in ("exact", "fast"):
        backend = TorchNative(mesh, 1, reduction)
        for axis in AXES:
            mine = part_of(rank)
            results |= {
                f"{reduction} sum {axis}": backend.all_reduce(mine, axis),
                f"{reduction} max {axis}": backend.all_reduce(mine, axis, "max"),
                f"{reduction} gather {axis}": backend.all_gather(mine, axis, dim=1),
                f"{reduction} scatter {axis}": backend.reduce_scatter(mine, axis, dim=0),
                f"{reduction} index {axis}": backend.index(axis),
            }
            assert torch.equal(mine, part_of(rank))
    torch.save(results, folder / f"{rank}.pt")
    group.barrier()
    group.leave()


def sum_exactly(folder: Path, environment: WorkerEnvironment) -> None:
    """Leave the exact sum over all workers, and this worker's slice of it."""
    rank, world_size = environment.rank, environment.world_size
    group = WorkerGroup.join(rank, world_size, environment.rendezvous)
    backend = TorchNative(Mesh(rank, data_parallel_size=world_size), 1, "exact")
    mine = part_of(rank)
    torch.save((backend.all_reduce(mine, "data"), backend.reduce_scatter(mine, "data")), folder / f"{rank}.pt")
    group.barrier()
    group.leave()
