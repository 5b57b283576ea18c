"""The command line of a tool: what is wrong on it is a `RecipeError`, as it is on a stage's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from services.common.command_line import require_text
from services.common.errors import RecipeError


class ToolParser(argparse.ArgumentParser):
    def __init__(self, tool: str, description: str) -> None:
        super().__init__(prog=f"python -m services.tokenizer {tool}", description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        arguments = self.parse_args(argv)
        require_text(arguments)
        return arguments

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage()}".rstrip())
