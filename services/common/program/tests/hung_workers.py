"""Functions that tests run as workers of which one does not answer, importable by other processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.common.errors import WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.testing.waiting import wait_until

WORKERS = 4
LIMIT = timedelta(seconds=0.5)


def lose_a_worker(call: tuple[str, Path], environment: WorkerEnvironment) -> None:
    """Call a collective for the first time since the group formed, while the last worker hangs."""
    name, folder = call
    rank = environment.rank
    group = ProcessGroup.join(rank, environment.world_size, environment.rendezvous)
    reduction = "fast" if name.startswith("fast") else "exact"
    backend = TorchNative(Mesh(rank, data_parallel_size=WORKERS), 1, reduction)
    _limit_collectives()
    collectives: dict[str, Callable[[], object]] = {
        "maximum": lambda: group.maximum(1),
        "started maximum": lambda: [group.start_maximum([1.0])()],
        "gather": lambda: group.gather({}),
        "exact sum": lambda: backend.all_reduce(torch.zeros(WORKERS), "data"),
        "fast sum": lambda: backend.reduce_scatter(torch.zeros(WORKERS), "data"),
    }
    _note_loss(folder, rank, collectives[name])


def _limit_collectives() -> None:
    """Limit the collectives that this worker begins from now on to LIMIT, also those along the mesh's axes."""
    c10d = dist.distributed_c10d
    for each in c10d._world.pg_map:
        if isinstance(each, dist.ProcessGroup) and {device.type for device in each._device_types} & {"cpu", "cuda"}:
            c10d._set_pg_timeout(LIMIT, each)


def _note_loss(folder: Path, rank: int, call: Callable[[], object]) -> None:
    """Write whether `call` raised `WorkersLost`. The last worker does not call it, and waits for the others' notes."""
    if rank == WORKERS - 1:
        wait_until(lambda: len(list(folder.iterdir())) == WORKERS - 1)
        return
    try:
        call()
        found = "returned"
    except WorkersLost:
        found = "lost"
    (folder / str(rank)).write_text(found, encoding="utf-8")
