"""Parses the command line that the three stages share: `--recipe FILE --root DIR [--section.key=value ...]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.common.errors import RecipeError
from services.common.input.credentials import WHERE_THEY_BELONG, holds_secret
from services.common.launch.cluster_address import default_launcher
from services.common.launch.launcher import LAUNCHERS
from services.common.process.command_parser import CommandParser, read_override
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe


def require_text(arguments: argparse.Namespace) -> None:
    """Raise `RecipeError` for an argument that is not UTF-8, has a NUL, or holds credentials, because manifests, logs
    and reports quote the arguments.
    """
    for name, value in vars(arguments).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (str, Path)) and not _is_text(str(each)):
                raise RecipeError(f"{name} {str(each)[:200]!r}: expected UTF-8 without NUL characters.")
            if isinstance(each, (str, Path)) and holds_secret(str(each)):
                raise RecipeError(f"{name}: holds a user, a password, a token or a signature. {WHERE_THEY_BELONG}")


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 come from a command line as halves of UTF-16 pairs
        return False


class RecipeParser(CommandParser):
    """An argument parser with `--recipe`, `--root` and overrides; it raises `RecipeError` for a wrong command line."""

    def __init__(self, service: str, description: str) -> None:
        super().__init__(
            prog=f"python -m services.{service}",
            description=description,
            epilog="Any recipe value can be overridden: --train.max_steps=500",
            allow_abbrev=False,
        )
        self.add_argument("--recipe", type=Path, required=True, metavar="FILE", help="the TOML file of the run")
        self.add_root()

    def add_launch(self) -> None:
        """Add `--launch`, whose value is the name of a launcher also where the command line has none."""
        self.add_argument(
            "--launch",
            type=lambda given: given or default_launcher(),
            choices=tuple(LAUNCHERS),
            default="",  # argparse passes a default that is a string through `type`
            help="inline: start processes on this machine, without Ray; ray: use the Ray cluster of RAY_ADDRESS, or "
            "start Ray on this machine (default: ray where RAY_ADDRESS is set, else inline)",
        )

    def add_metrics_port(self) -> None:
        """Add `--metrics-port` and `--metrics-host`."""
        self.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus; 0: any port")
        self.add_argument(
            "--metrics-host",
            default="127.0.0.1",
            metavar="HOST",
            help="address of --metrics-port (default: %(default)s)",
        )

    def parse(self, argv: list[str], recipe: Recipe | None = None) -> tuple[argparse.Namespace, Recipe]:
        """Parse the options, and load the recipe with its overrides unless it is given; `--root` becomes absolute."""
        arguments, rest = self.parse_known_args(argv)
        overrides = {}
        for item in rest:
            override = read_override(item)
            if override is None:
                self.error(f"unrecognized argument {item!r}; a recipe override reads --section.key=value")
            key, value = override
            overrides[key] = value
        arguments.root = arguments.root.absolute()
        require_text(arguments)
        return arguments, recipe or load_recipe(arguments.recipe, overrides)


class StageParser(RecipeParser):
    """The argument parser of a stage, with `--dry-run`."""

    def __init__(self, service: str, description: str) -> None:
        super().__init__(service, description)
        self.add_argument("--dry-run", action="store_true", help="print the recipe and what follows from it, and exit")
