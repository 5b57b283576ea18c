"""The workers of a run, as a launcher starts them; and what a command begins of it before it imports its own program.

That is the part of a start that takes seconds. `begin_start` looks at the command line and the recipe alone; what is
wrong with them, the command says when it reads them.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.common.errors import MillraceError
from services.common.launch.launcher import WorkerGroupSpec, choose_launcher
from services.common.process.command_line import StageParser, read_override
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.trainer.inspection.fit import instance_type

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_EVERY_WORKER = ("services.trainer.supervise", "services.common.program.backends.torch_native")
_COMPILED = ("services.common.program.backends.inductor", "services.trainer.inductor_start:begin_inductor")


def begin_start(argv: list[str]) -> None:
    """Let the launcher of a training command prepare for its workers; do nothing for other commands."""
    is_training = bool(argv) and (argv[0] == "train" or argv[0].startswith("-"))
    if not is_training or {"-h", "--help"}.intersection(argv):
        return
    parser = StageParser("trainer", "")
    parser.add_launch()
    try:
        options, rest = parser.parse_known_args(argv[argv[0] == "train" :])
        recipe = load_recipe(options.recipe, dict(filter(None, map(read_override, rest))))
        if not options.dry_run:
            choose_launcher(options.launch).prepare(describe_workers(recipe, options.root))
    except MillraceError:
        return


def describe_workers(recipe: Recipe, shared_folder: Path) -> WorkerGroupSpec:
    node = instance_type(recipe)
    return WorkerGroupSpec(
        num_workers=recipe.parallel.num_workers,
        threads_per_worker=recipe.parallel.threads_per_worker,
        workers_per_node=recipe.cluster.trainer_workers_per_node,
        shared_folder=shared_folder,
        device=recipe.parallel.device,
        logical_core_size=node.logical_core_size if node else None,
        preload=_modules_of_workers(recipe),
    )


def _modules_of_workers(recipe: Recipe) -> tuple[str, ...]:
    """Nothing for a device that a worker has to be told of before it imports torch. Nothing either beside a GPU:
    Inductor's imports open it, also for recipes of the CPU, and no fork of a process that has opened it can use torch.
    """
    if recipe.parallel.device != "cpu" or any(map(os.path.exists, GPU_FILES)):
        return ()
    return _EVERY_WORKER + (_COMPILED if recipe.compile.enabled else ())
