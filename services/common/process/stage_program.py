"""Runs the program of a stage, `python -m services.<stage>`: the stage's own command, or one of three others.

`artifacts` runs `python -m services.common.artifacts`, `batch` runs a node of an AWS Batch job, and `one-off` runs a
subcommand in a container of its own. This program is the entry point of a stage's image, which AWS Batch cannot
replace, so every command that a container of the stage runs begins here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from services.common.errors import StorageError
from services.common.process.entry_point import run_program
from services.common.process.subcommands import ARTIFACTS, ONE_OFF

if TYPE_CHECKING:
    from services.common.recipe.schema import Stage

ON_BATCH = "batch"

Main = Callable[[list[str]], int]


def run_stage(stage: Stage, main: Main) -> NoReturn:
    """Run `main(argv)`, or the command that the first argument names, and exit with its code."""
    run_program(lambda argv: _run(stage, main, argv))


def _run(stage: Stage, main: Main, argv: list[str]) -> int:
    _require_working_directory()
    if argv[:1] == [ON_BATCH]:
        return _run_on_batch(argv[1:])
    if argv[:1] == [ONE_OFF]:
        from services.common.process.one_off import run_one_off  # noqa: PLC0415 - few programs need it

        return run_one_off(stage, lambda words: _run_here(main, words), argv[1:])
    return _run_here(main, argv)


def _require_working_directory() -> None:
    """Raise `StorageError` where the working directory was removed: libraries and started processes need one."""
    try:
        Path.cwd()
    except OSError as error:
        raise StorageError(
            f"the working directory cannot be read: {error.strerror}. Change to a folder that exists, and run the same "
            f"command there."
        ) from error


def _run_here(main: Main, argv: list[str]) -> int:
    if argv[:1] == [ARTIFACTS]:
        from services.common.artifacts.__main__ import main as look_at_artifacts  # noqa: PLC0415 - few programs need it

        return look_at_artifacts(argv[1:])
    return main(argv)


def _run_on_batch(argv: list[str]) -> int:
    from services.common.launch.batch.job import main  # noqa: PLC0415 - few programs need it

    return main(argv)
