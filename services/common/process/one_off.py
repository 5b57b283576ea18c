"""Runs one subcommand in a container of its own: `python -m services.<stage> one-off [OPTION ...] -- SUBCOMMAND`.

The container and the person who asked for it share no file system, so the recipe travels in the environment variable
MILLRACE_RECIPE, and results stay below the root. The subcommand gets `--recipe` and `--root` where it takes them. Its
working directory is the root, so that relative paths are on the shared file system. The exit code is the subcommand's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import RecipeError
from services.common.launch.batch.node import require_root
from services.common.process.command_line import make_app, run_app
from services.common.process.subcommands import WITH_RECIPE, WITHOUT_ROOT, require_subcommand
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import Stage


def run_one_off(stage: Stage, run: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run the subcommand with `run(words)`, and return its exit code.

    Raises `RecipeError` for an unknown subcommand, and `StorageError` where the shared file system is not mounted.
    """
    app = make_app()

    @app.command()
    def one_off(
        root: Annotated[Path, typer.Option(metavar="DIR", help="folder of all artifacts")],
        words: Annotated[list[str], typer.Argument(metavar="-- SUBCOMMAND ...")],
        require_mount: Annotated[
            bool, typer.Option("--require-mount", help="end with 5 unless a shared file system is mounted at the root")
        ] = False,
    ) -> int:
        """Run one subcommand of a stage in a container of its own. make stage-run starts this."""
        name, *others = words
        require_subcommand(stage, name)
        if require_mount:
            require_root(root)
        given = ["--recipe", str(_write_recipe())] if name in WITH_RECIPE else []
        if name not in WITHOUT_ROOT:
            given += ["--root", str(root)]
        os.chdir(root)
        return run([name, *given, *others])

    return run_app(app, argv, f"services.{stage} one-off")


def _write_recipe() -> Path:
    """Write the recipe of MILLRACE_RECIPE to a file of this container."""
    packed = os.environ.get(RECIPE_VARIABLE)
    if not packed:
        raise RecipeError(f"{RECIPE_VARIABLE} is not set. Start the subcommand with make stage-run.")
    path = Path(tempfile.mkdtemp(prefix="one-off-")) / "recipe.toml"
    path.write_bytes(unpack_recipe(packed))
    return path
