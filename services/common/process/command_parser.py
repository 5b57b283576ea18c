"""Parses the command lines of all programs of the stages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from services.common.errors import RecipeError


def read_override(argument: str) -> tuple[str, str] | None:
    """Return key and value of a recipe override, `--section.key=value`; None for any other argument."""
    key, equals, value = argument.removeprefix("--").partition("=")
    return (key, value) if argument.startswith("--") and equals and "." in key else None


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises `RecipeError` with its usage for a wrong command line, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage()}".rstrip())

    def parse_options(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options before the word `--`, and return them with the words after it, which are a command."""
        at = argv.index("--") if "--" in argv else len(argv)
        return self.parse_args(argv[:at]), list(argv[at + 1 :])

    def add_root(self) -> None:
        """Add `--root`, the folder of all artifacts."""
        self.add_argument("--root", type=Path, default=Path("fsx"), help="folder of all artifacts (default: ./fsx)")
