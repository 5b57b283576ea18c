"""Describes a run's workers to the launcher, and starts their fork server before the command imports its program.

Those imports take seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.launch.child_processes import start_fork_server
from services.common.launch.launcher import INLINE, WorkerGroupSpec
from services.common.recipe.derived import instance_type
from services.common.recipe.schema import Recipe

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_PRELOAD = "services.trainer.workers.preload"
_COMPILED_PRELOAD = "services.trainer.workers.inductor_preload"


def prestart_workers(recipe: Recipe, launch: str) -> None:
    """Start the fork server of workers on this machine, while the command's program is imported."""
    if launch == INLINE:
        start_fork_server(_modules_of_workers(recipe))


def describe_workers(recipe: Recipe, shared_folder: Path, kept_folder: str = "") -> WorkerGroupSpec:
    node = instance_type(recipe)
    return WorkerGroupSpec(
        num_workers=recipe.parallel.num_workers,
        threads_per_worker=recipe.parallel.threads_per_worker,
        workers_per_node=recipe.cluster.trainer_workers_per_node,
        shared_folder=shared_folder,
        kept_folder=kept_folder,
        device=recipe.parallel.device,
        logical_core_size=node.logical_core_size if node else None,
        preload=_modules_of_workers(recipe),
    )


def _modules_of_workers(recipe: Recipe) -> tuple[str, ...]:
    """Return the modules that workers can be forked with.

    There are none with TorchNeuron, whose library opens its device as torch is imported. Inductor's imports open a GPU,
    even for a recipe for the CPU, and a fork of a process that has opened a GPU cannot use torch.
    """
    if recipe.parallel.device == "neuron":
        return ()
    is_compiled = recipe.parallel.device == "cpu" and recipe.compile.enabled
    return (_COMPILED_PRELOAD if is_compiled and not any(map(os.path.exists, GPU_FILES)) else _PRELOAD,)
