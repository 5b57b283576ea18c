"""Runs one subcommand in a container of its own: `python -m services.<stage> one-off [OPTION ...] -- SUBCOMMAND`.

The container and the person who asked for it share no file system. The recipe therefore travels in the environment
variable MILLRACE_RECIPE, and small result files travel back as lines of the output. The subcommand gets `--recipe` and
`--root` where it takes them. Its working directory is the root, so that relative paths are on the shared file system.
The exit code is the subcommand's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.errors import RecipeError
from services.common.launch.batch.node import require_root
from services.common.process.brought_files import offered_files, pack_file
from services.common.process.command_parser import CommandParser
from services.common.process.subcommands import find_subcommand
from services.common.recipe.packed_recipe import RECIPE_VARIABLE, unpack_recipe
from services.common.recipe.schema import Stage

RECIPE_FILE = "recipe.toml"


def run_one_off(stage: Stage, run: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run the subcommand with `run(words)`, print its result files as lines, and return its exit code.

    Raises `RecipeError` for a subcommand that the stage does not have, before anything runs, and `StorageError` where
    the shared file system is required and not mounted.
    """
    options, words = _parse(argv)
    subcommand = find_subcommand(stage, words[0])
    if options.require_mount:
        require_root(options.root)
    given = _write_recipe(os.environ) if subcommand.reads_recipe(words[1:]) else []
    if subcommand.takes_recipe or subcommand.takes_root:
        given += ["--root", str(options.root)]
    os.chdir(options.root)
    exit_code = run([subcommand.name, *given, *words[1:]])
    if exit_code == 0:
        _bring([options.root / path for path in options.bring])
    return exit_code


def _bring(named: list[Path]) -> None:
    """Print the requested files and those that the subcommand offers, as lines of the output."""
    for number, path in enumerate(dict.fromkeys([*named, *offered_files()])):
        for line in pack_file(path, number):
            print(line)


def _write_recipe(variables: Mapping[str, str]) -> list[str]:
    """Write the recipe of MILLRACE_RECIPE to a file, and return the subcommand's option `--recipe`."""
    packed = variables.get(RECIPE_VARIABLE, "")
    if not packed:
        raise RecipeError(
            f"{RECIPE_VARIABLE} is not set, and the subcommand needs a recipe. Start it with make stage-run, which "
            f"sends the recipe."
        )
    path = Path(tempfile.mkdtemp(prefix="one-off-")) / RECIPE_FILE
    path.write_bytes(unpack_recipe(packed))
    return ["--recipe", str(path)]


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(
        prog="python -m services.STAGE one-off",
        usage="%(prog)s [options] -- SUBCOMMAND ...",
        description="Run one subcommand of a stage in a container of its own. make stage-run starts this.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder of all artifacts")
    parser.add_argument(
        "--bring", action="append", default=[], metavar="PATH", help="print this file below the root, for the caller"
    )
    parser.add_argument(
        "--require-mount", action="store_true", help="end with 5 unless a shared file system is mounted at the root"
    )
    options, words = parser.parse_options(argv)
    if not words:
        parser.error("expected a subcommand after --")
    return options, words
