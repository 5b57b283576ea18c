"""The program of a stage, `python -m services.<stage>`: its own command, or one of three words and what follows.

`artifacts` looks at artifacts, as `python -m services.common.artifacts` does; `batch` is what a node of an AWS Batch
job does; `one-off` runs a subcommand in a container of its own. An image's entry point is this program, and AWS Batch
cannot replace that: all that a container of the stage may do begins here.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from services.common.launch.guard import end_guard, start_guard
from services.common.process.entry_point import run_program
from services.common.process.subcommands import ARTIFACTS, ONE_OFF

if TYPE_CHECKING:
    from services.common.recipe.schema import Stage

ON_BATCH = "batch"

Main = Callable[[list[str]], int]


def run_stage(stage: Stage, main: Main) -> NoReturn:
    """Run `main(argv)`, or what the first argument stands for."""
    run_program(lambda argv: _run(stage, main, argv))


def _run(stage: Stage, main: Main, argv: list[str]) -> int:
    if argv[:1] == [ON_BATCH]:
        return _run_on_batch(argv[1:])
    atexit.register(end_guard)
    # Nothing that the command starts outlives it, and nothing that hangs keeps it from its end.
    start_guard().heed_signals()
    if argv[:1] == [ONE_OFF]:
        from services.common.launch.one_off import run_one_off  # noqa: PLC0415 - most programs are none

        return run_one_off(stage, lambda words: _run_here(main, words), argv[1:])
    return _run_here(main, argv)


def _run_here(main: Main, argv: list[str]) -> int:
    if argv[:1] == [ARTIFACTS]:
        from services.common.artifacts.__main__ import main as look_at_artifacts  # noqa: PLC0415 - most do not

        return look_at_artifacts(argv[1:])
    return main(argv)


def _run_on_batch(argv: list[str]) -> int:
    from services.common.launch.batch.job import main  # noqa: PLC0415 - most programs are not on Batch

    return main(argv)
