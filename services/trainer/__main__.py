"""Entry point of `python -m services.trainer`; the commands are in `services.trainer.command`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.process.entry_point import importing
from services.common.process.stage_program import run_stage

if TYPE_CHECKING:
    from services.common.recipe.schema import Recipe


def main(argv: list[str], recipe: Recipe | None = None) -> int:
    with importing():
        from services.trainer.command import main as command  # noqa: PLC0415 - takes seconds

    return command(argv, recipe)


def begin_and_run(argv: list[str]) -> int:
    """Run `main` in a process of its own, whose launcher prepares for the workers during the imports.

    These preparations may outlast an error of `main`; they end with the process.
    """
    with importing():
        from services.trainer.worker_start import begin_start  # noqa: PLC0415 - takes a fifth of a second

        recipe = begin_start(argv)
    return main(argv, recipe)


if __name__ == "__main__":
    run_stage("trainer", begin_and_run)
