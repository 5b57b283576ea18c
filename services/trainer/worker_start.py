"""Describes a run's workers to the launcher, and starts their fork server before the command imports its program.

Those imports take seconds. `begin_start` reads only the command line and the recipe, and leaves all errors in them to
the command.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.errors import MillraceError
from services.common.launch.child_processes import start_fork_server
from services.common.launch.launcher import INLINE, WorkerGroupSpec
from services.common.process.command_line import StageParser
from services.common.process.command_parser import read_override
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.trainer.inspection.fit import instance_type

WITH_WORKERS = ("train", "evaluate")
"""Commands that start workers; `train` is the default."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_PRELOAD = "services.trainer.worker_preload"
_COMPILED_PRELOAD = "services.trainer.compiled_worker_preload"


def begin_start(argv: list[str]) -> Recipe | None:
    """Start the fork server of a command with workers on this machine, and return the command's recipe.

    Return None, and start nothing, for other commands and for a wrong command line.
    """
    has_workers = bool(argv) and (argv[0] in WITH_WORKERS or argv[0].startswith("-"))
    if not has_workers or {"-h", "--help"}.intersection(argv):
        return None
    parser = StageParser("trainer", "")
    parser.add_launch()
    try:
        options, rest = parser.parse_known_args(argv[argv[0] in WITH_WORKERS :])
        recipe = load_recipe(options.recipe, dict(filter(None, map(read_override, rest))))
        if options.launch == INLINE and not options.dry_run:
            start_fork_server(_modules_of_workers(recipe))
    except MillraceError:  # the command finds it, too
        return None
    return recipe


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
    has_inductor = (
        recipe.parallel.device == "cpu" and recipe.compile.enabled and not any(map(os.path.exists, GPU_FILES))
    )
    return (_COMPILED_PRELOAD if has_inductor else _PRELOAD,)
