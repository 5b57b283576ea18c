"""Command lines of the tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from services.common.errors import RecipeError
from services.common.process.command_line import require_text


class ToolParser(argparse.ArgumentParser):
    """An argument parser that raises `RecipeError` for a wrong command line, as the stage's parser does."""

    def __init__(self, tool: str, description: str) -> None:
        super().__init__(prog=f"python -m services.tokenizer {tool}", description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        arguments = self.parse_args(argv)
        require_text(arguments)
        return arguments

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage()}".rstrip())
