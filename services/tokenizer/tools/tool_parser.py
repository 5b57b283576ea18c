"""Command lines of the tools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from services.common.process.command_line import require_text
from services.common.process.command_parser import CommandParser


class ToolParser(CommandParser):
    """The argument parser of one tool of the tokenizer."""

    def __init__(self, tool: str, description: str) -> None:
        super().__init__(prog=f"python -m services.tokenizer {tool}", description=description, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        arguments = self.parse_args(argv)
        require_text(arguments)
        return arguments
