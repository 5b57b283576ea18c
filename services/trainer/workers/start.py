"""Describes a run's workers to the launcher, and starts their fork server before the command imports its program.

Those imports take seconds.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path

from services.common.errors import MillraceError
from services.common.launch.child_processes import start_fork_server
from services.common.launch.cluster_address import default_launcher
from services.common.launch.launcher import INLINE, WorkerGroupSpec
from services.common.recipe.derived import instance_type
from services.common.recipe.file import load_recipe, read_overrides
from services.common.recipe.schema import Recipe

WITH_WORKERS = ("train", "evaluate")
"""Commands that start workers; `train` is the default."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_PRELOAD = "services.trainer.workers.preload"
_COMPILED_PRELOAD = "services.trainer.workers.inductor_preload"


def prestart_workers(argv: list[str]) -> None:
    """Start the fork server of a command with workers on this machine, while the command's program is imported.

    This only guesses from the command line, which the command reads in full and checks.
    """
    has_workers = bool(argv) and (argv[0] in WITH_WORKERS or argv[0].startswith("-"))
    if not has_workers or {"-h", "--help", "--dry-run"}.intersection(argv):
        return
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--launch", nargs="?")
    options.add_argument("--recipe", nargs="?", default="")
    given, _ = options.parse_known_args(argv)
    with suppress(MillraceError, OSError):
        if (given.launch or default_launcher()) == INLINE:
            recipe = load_recipe(Path(given.recipe or ""), read_overrides(argv))
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
