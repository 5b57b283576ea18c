"""Deploys stages: `python -m deploy.commands COMMAND`. Options are the variables of make's targets, too."""

from __future__ import annotations

import sys

from deploy.commands.app import app
from services.common.process.command_line import run_app
from services.common.process.entry_point import exit_code_of


def main(argv: list[str]) -> int:
    return run_app(app, argv, "deploy.commands")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
