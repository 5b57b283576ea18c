"""The command `millrace`: stages, runs and deployments under one name.

A command takes the place of this process with the program that does the work, so signals, exit codes and options are
that program's. This module imports no library that the help does not need.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from millrace import TREE
from millrace.programs import DEPLOY_PROGRAMS, HELP, PROGRAMS, Call, Program, require_installed
from services.common.process.entry_point import COMMAND_VARIABLE, exit_code_of, run_main

_SETTINGS: dict[str, Any] = {"help_option_names": list(HELP)}
app = typer.Typer(
    help="Pre-train Llama and Qwen3 models in three stages that meet in files: tokenize, compile, train.",
    epilog="RECIPE is a TOML file, or the name of a shipped one: millrace train tiny-cpu --train.max_steps=500. "
    "`millrace COMMAND --help` lists the options, `millrace --version` prints the versions; `make` lists what is "
    "beside: clusters, infrastructure, images.",
    no_args_is_help=True,
    context_settings=_SETTINGS,
)
deploy_app = typer.Typer(
    help="Deploy stages on KubeRay or AWS Batch: millrace deploy stage trainer --target batch --nodes 4",
    epilog="`make deploy-stage NODES=4 KEEP=1` takes the same options as variables.",
    no_args_is_help=True,
    context_settings=_SETTINGS,
)


class _StartCommand(TyperCommand):
    """Passes every word on to the program, --help too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def main() -> NoReturn:
    """Run the command line of this process, and end with the exit code."""
    sys.exit(exit_code_of(lambda: run_main(lambda words: app(words, prog_name="millrace"), sys.argv[1:])))


def start(call: Call) -> NoReturn:
    """Take the place of this process. Raises `DeviceError` where the program's libraries are not installed."""
    require_installed(call)
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))
    # A folder `services` beside a person is theirs, for the program's workers, too.
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    environment |= {COMMAND_VARIABLE: shlex.join(["millrace", *sys.argv[1:]])}
    command = [sys.executable, "-m", call.module, *call.words]
    os.execve(sys.executable, command, environment)  # nosec B606 # it replaces itself by the program


def _add(parent: typer.Typer, name: str, program: Program, panel: str | None) -> None:
    @parent.command(name, cls=_StartCommand, help=program.help, rich_help_panel=panel)
    def command(context: typer.Context) -> None:
        if set(HELP).intersection(context.args):
            example = program.call([program.first.lstrip("-").upper()] if program.first else [])
            print(f"{context.command_path} {program.usage}\nruns {example}\n")
        start(program.call(context.args))


for _panel, _programs in PROGRAMS.items():
    for _name, _program in _programs.items():
        _add(app, _name, _program, _panel)
for _name, _program in DEPLOY_PROGRAMS.items():
    _add(deploy_app, _name, _program, None)
app.add_typer(deploy_app, name="deploy", rich_help_panel="On a cluster")
