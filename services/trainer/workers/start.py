"""Describes a run's workers to the launcher, and starts their fork server before the command imports its program.

Those imports take seconds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from services.common.errors import MillraceError
from services.common.launch.child_processes import start_fork_server
from services.common.launch.cluster_address import default_launcher
from services.common.launch.launcher import INLINE, WorkerGroupSpec
from services.common.recipe.file import load_recipe, read_overrides
from services.common.recipe.schema import Recipe
from services.trainer.inspection.fit import instance_type

WITH_WORKERS = ("train", "evaluate")
"""Commands that start workers; `train` is the default."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_PRELOAD = "services.trainer.workers.preload"
_COMPILED_PRELOAD = "services.trainer.workers.inductor_preload"


def prestart_workers(argv: list[str]) -> None:
    """Start the fork server of a command with workers on this machine, while the command's program is imported.

    This only guesses from the command line; the command reads it and reports every error.
    """
    has_workers = bool(argv) and (argv[0] in WITH_WORKERS or argv[0].startswith("-"))
    if not has_workers or {"-h", "--help", "--dry-run"}.intersection(argv):
        return
    with suppress(MillraceError, OSError):
        if (_value_of("--launch", argv) or default_launcher()) == INLINE:
            recipe = load_recipe(Path(_value_of("--recipe", argv)), read_overrides(argv))
            start_fork_server(_modules_of_workers(recipe))


def _value_of(option: str, argv: list[str]) -> str:
    """Return the value of `--option value` or `--option=value`; empty where the option is not given."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


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
