"""The program of a stage, `python -m services.<stage>`: its own command, or `batch` and what follows."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import NoReturn

from services.common.entry_point import run_program
from services.common.launch.guard import end_guard, start_guard

ON_BATCH = "batch"
"""The first word of what AWS Batch appends to an image's entry point: it cannot replace that, which is the stage."""


def run_stage(main: Callable[[list[str]], int]) -> NoReturn:
    """Run `main(argv)`, or where the first argument is `batch` what a node of an AWS Batch job does."""
    run_program(lambda argv: _run_on_batch(argv[1:]) if argv[:1] == [ON_BATCH] else _run_guarded(main, argv))


def _run_guarded(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Nothing that the command starts outlives it, and nothing that hangs keeps it from its end."""
    atexit.register(end_guard)
    start_guard().heed_signals()
    return main(argv)


def _run_on_batch(argv: list[str]) -> int:
    from services.common.launch.batch import main  # noqa: PLC0415 - most programs are not on Batch

    return main(argv)
