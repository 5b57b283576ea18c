"""A subcommand of a stage in a container of its own: `python -m services.<stage> one-off [OPTION ...] -- SUBCOMMAND`.

What starts the container has no file system in common with whoever asked for it. So the recipe travels in the variable
MILLRACE_RECIPE, and small results go home as lines of the output. The subcommand gets `--recipe` and `--root` where it
takes them, and the root as its working directory: what it writes to a relative path is on the shared file system. The
exit code is the subcommand's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from services.common.errors import RecipeError
from services.common.launch.batch.node import RECIPE_VARIABLE, require_root, unpack_recipe
from services.common.launch.brought_files import offered_files, pack_file
from services.common.process.subcommands import find_subcommand
from services.common.recipe.schema import Stage

RECIPE_FILE = "recipe.toml"


def run_one_off(stage: Stage, run: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run the subcommand by `run`, and print what it brings home; its exit code.

    Raises `RecipeError` for a subcommand that the stage does not have, before anything of it begins, and `StorageError`
    where the file system must be mounted and is not.
    """
    options, words = _parse(argv)
    subcommand = find_subcommand(stage, words[0])
    if options.require_mount:
        require_root(options.root)
    given = _write_recipe(options.root, os.environ) if subcommand.takes_recipe else []
    os.chdir(options.root)
    exit_code = run([subcommand.name, *given, *words[1:]])
    if exit_code == 0:
        _bring([options.root / path for path in options.bring])
    return exit_code


def _bring(named: list[Path]) -> None:
    """Print the files that were asked for, and those that the subcommand offers."""
    for number, path in enumerate(dict.fromkeys([*named, *offered_files()])):
        for line in pack_file(path, number):
            print(line)


def _write_recipe(root: Path, variables: Mapping[str, str]) -> list[str]:
    """The options with which the subcommand finds the recipe that travelled with it, and the root."""
    packed = variables.get(RECIPE_VARIABLE, "")
    if not packed:
        raise RecipeError(
            f"{RECIPE_VARIABLE} is not set: make stage-run sends a recipe with a subcommand that takes one."
        )
    path = Path(tempfile.mkdtemp(prefix="one-off-")) / RECIPE_FILE
    path.write_bytes(unpack_recipe(packed))
    return ["--recipe", str(path), "--root", str(root)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage()}".rstrip())


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(
        prog="python -m services.STAGE one-off",
        usage="%(prog)s [options] -- SUBCOMMAND ...",
        description="Run a subcommand of a stage in a container of its own, as make stage-run starts it.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=Path, required=True, metavar="DIR", help="folder of all artifacts")
    parser.add_argument(
        "--bring", action="append", default=[], metavar="PATH", help="a file below the root to print for who asked"
    )
    parser.add_argument(
        "--require-mount", action="store_true", help="end with 5 where no shared file system is mounted at the root"
    )
    at = argv.index("--") if "--" in argv else len(argv)
    options, words = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not words:
        parser.error("expected a subcommand after --")
    return options, words
