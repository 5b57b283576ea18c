"""Makes a process a worker of a job: with its device, in the process group of all workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch.hub

from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.backend import Backend
from services.common.program.backends.choice import choose_backend
from services.common.program.mesh import make_mesh
from services.common.program.process_group import GLOO, ProcessGroup
from services.trainer.job import Job
from services.trainer.workers.node_staging import compile_cache_folder


def prepare_device(job: Job) -> str:
    """Name the node's copy of the compile cache to the libraries of the job's device, which may read the name when they
    are imported. Return the name of the collectives that form torch's own group of all workers.
    """
    device = job.recipe.parallel.device
    backend_class = choose_backend(device)
    os.environ.update(backend_class.cache_environment(compile_cache_folder(job), job.recipe))
    return backend_class.world_collectives(device)


@contextmanager
def joined_group(environment: WorkerEnvironment, world: str = GLOO) -> Iterator[ProcessGroup]:
    """Join the process group of all workers, and leave it once all workers have reached the end of the block.

    `world` comes from `prepare_device`. A worker that raises an error does not leave: its end ends the group.
    """
    place = (environment.rank, environment.world_size, environment.rendezvous)
    group = ProcessGroup.join(*place, world)
    yield group
    group.barrier()  # an error that a worker raises next would end the group before rank 0 has finished its duties
    group.leave()


def make_backend(job: Job, environment: WorkerEnvironment) -> Backend:
    """Make the backend of this worker's device, after `prepare_device`."""
    # The lock of Inductor's bars would be a semaphore, of which Python warns after workers that were stopped.
    if set_lock := getattr(getattr(torch.hub, "tqdm", None), "set_lock", None):
        set_lock(RLock())
    recipe, parallel = job.recipe, job.recipe.parallel
    mesh = make_mesh(recipe, environment.rank, environment.world_size)
    settings = (parallel.threads_per_worker, recipe.train.reduction, parallel.device, environment.local_rank)
    backend = choose_backend(parallel.device)(mesh, *settings)
    if recipe.compile.require_warm:
        backend.require_warm_cache()
    return backend
