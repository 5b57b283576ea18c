"""Lists the commands of the repository, with the help that each of them prints."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from services.common.process.subcommands import ARTIFACTS, SUBCOMMANDS
from services.common.recipe.schema import STAGES

COLUMNS = 100
"""Width of the help texts, in characters."""


@dataclass(frozen=True)
class Command:
    """A program of the repository, and one of its subcommands."""

    module: str
    """Name after `python -m`."""
    subcommand: str = ""
    """First argument; empty for the program's own command."""

    def __str__(self) -> str:
        return f"python -m {self.module} {self.subcommand}".rstrip()


def list_commands() -> list[Command]:
    """All commands that the documents may show with options, in the order of the reference."""
    stages = [
        Command(f"services.{stage}", name)
        for stage in STAGES
        for name in ("", *(name for name in SUBCOMMANDS[stage] if name != ARTIFACTS), *_ONLY_AT_HOME.get(stage, ()))
    ]
    return [*stages, *_OTHERS]


_ONLY_AT_HOME = {"tokenizer": ("pin",)}
"""Subcommands that no cluster runs, and that `services.common.process.subcommands` therefore leaves out."""
_OTHERS = (
    Command("millrace"),
    *(Command("services.common.artifacts", name) for name in ("list", "verify", "show", "gc")),
    *(Command("deploy.commands", name) for name in ("deploy-stage", "rollback-stage", "pipeline", "stage-run")),
    *(Command("deploy.commands", name) for name in ("stage-status", "stage-logs", "stop-stage", "demo")),
    Command("services.common.hardware.image_platform"),
    Command("benchmarks.tokenizer"),
    Command("benchmarks.trainer"),
    Command("benchmarks.tokenizer.many_files"),
    Command("benchmarks.trainer.start_rows"),
    Command("benchmarks.trainer.attention_row"),
    Command("benchmarks.trainer.failure_simulation"),
    Command("docs.site.picture"),
)


def read_help(command: Command) -> str:
    """The text that the command prints for `--help`. To be called in a process that does nothing else."""
    package = importlib.util.find_spec(command.module)
    if package is None:
        raise ModuleNotFoundError(command.module)
    is_package = package.submodule_search_locations is not None
    main = importlib.import_module(f"{command.module}.__main__" if is_package else command.module).main
    words = [*command.subcommand.split(), "--help"]
    printed = io.StringIO()
    with _command_line(command.module, words), contextlib.redirect_stdout(printed):
        try:
            main(words) if inspect.signature(main).parameters else main()
        except SystemExit as end:  # of a program without typer
            if end.code:
                raise
    return printed.getvalue().rstrip() + "\n"


@contextlib.contextmanager
def _command_line(module: str, words: list[str]) -> Iterator[None]:
    argv, columns = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [module, *words], str(COLUMNS)
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
