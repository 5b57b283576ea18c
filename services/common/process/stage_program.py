"""Runs the program of a stage, `python -m services.<stage>`: the stage's own commands, or one of three others.

`artifacts` runs `python -m services.common.artifacts`, `batch` runs a node of an AWS Batch job, and `one-off` runs a
subcommand in a container of its own. This program is the entry point of a stage's image, which AWS Batch cannot
replace, so every command that a container of the stage runs begins here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from services.common.process.entry_point import run_program
from services.common.process.subcommands import ARTIFACTS, ON_BATCH, ONE_OFF

if TYPE_CHECKING:
    from services.common.recipe.schema import Stage

Main = Callable[[list[str]], int]
_SHARED = {ARTIFACTS: "services.common.artifacts.__main__", ON_BATCH: "services.common.launch.batch.job"}
"""Modules of the commands that every stage has. Few programs need one, so none is imported before."""


def run_stage(stage: Stage, main: Main) -> NoReturn:
    """Run `main(argv)`, or the command that the first argument names, and exit with its code."""

    def run(argv: list[str]) -> int:
        first = argv[0] if argv else ""
        if first == ONE_OFF:
            one_off = importlib.import_module("services.common.process.one_off")
            return int(one_off.run_one_off(stage, run, argv[1:]))
        if first in _SHARED:
            return int(importlib.import_module(_SHARED[first]).main(argv[1:]))
        return main(argv)

    run_program(run, stage)
