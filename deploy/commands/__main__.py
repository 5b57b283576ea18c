"""Deploys stages: `python -m deploy.commands COMMAND`, on the target that TARGET names, `kuberay` or `batch`.

The Makefile's targets call it and say which variables each takes; it reads them from the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from deploy.client.one_off import read_one_off, split_words
from deploy.client.request import LOSS_TIMEOUT_SECONDS, DeployRequest, Mode, require_stage_name
from deploy.client.target import Target
from deploy.client.variables import read_hours, read_number, read_switch, read_target, require_taken
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import Stage

START_TIMEOUT_SECONDS = 1800
RETRIES = 3


def main(argv: list[str]) -> int:
    commands = {
        "deploy-stage": deploy,
        "stage-status": status,
        "stage-logs": logs,
        "stop-stage": stop,
        "rollback-stage": rollback,
        "pipeline": pipeline,
        "stage-run": run,
    }
    parser = argparse.ArgumentParser(prog="python -m deploy.commands", description=__doc__)
    parser.add_argument("command", choices=commands)
    command = parser.parse_args(argv).command
    require_taken(command, os.environ)
    return commands[command]()


def deploy() -> int:
    request = _read_request(_stage())
    with _output(request.is_dry_run) as file:
        return _target().deploy(request, file)


def status() -> int:
    return _target().show_status()


def logs() -> int:
    stage = _stage()
    return _target().show_log(stage)


def stop() -> int:
    stage = _stage()
    return _target().stop(stage)


def rollback() -> int:
    """The settings with which the stage was deployed last, where nothing else was named."""
    request = _read_request(_stage())
    with _output(request.is_dry_run) as file:
        return _target().roll_back(request, file)


def pipeline() -> int:
    request = _read_request("tokenizer")
    with _output(request.is_dry_run) as file:
        return _target().run_pipeline(request, file)


def run() -> int:
    """A subcommand of a stage, in a short Job."""
    request = read_one_off(os.environ)
    with _output(request.is_dry_run) as file:
        return _target().run_one_off(request, file)


def _target() -> Target:
    if read_target(os.environ) == "kuberay":
        from k8s.client.target import KubeRay  # noqa: PLC0415 - each needs libraries that the other does without
        from k8s.objects.api import connect  # noqa: PLC0415

        return KubeRay(connect())
    from deploy.batch.target import connect_batch  # noqa: PLC0415

    return connect_batch(Path(os.environ["CONFIG"]) if os.environ.get("CONFIG") else None)


def _read_request(stage: Stage) -> DeployRequest:
    mode, recipe, arguments = os.environ.get("MODE"), os.environ.get("RECIPE"), os.environ.get("ARGS")
    if mode not in (None, "", "shared", "isolated"):
        raise RecipeError(f"MODE={mode}: shared or isolated")
    return DeployRequest(
        stage=stage,
        recipe=Path(recipe) if recipe else None,
        tag=os.environ.get("TAG", ""),
        nodes=read_number(os.environ, "NODES", 1) if os.environ.get("NODES") else None,
        mode=cast(Mode, mode) if mode else None,
        arguments=split_words("ARGS", arguments) if arguments is not None else None,
        retries=read_number(os.environ, "RETRIES", RETRIES),
        start_timeout_seconds=read_number(os.environ, "WAIT", START_TIMEOUT_SECONDS),
        loss_timeout_seconds=read_number(os.environ, "WAIT_AFTER_LOSS", LOSS_TIMEOUT_SECONDS),
        drain_seconds=read_number(os.environ, "DRAIN", 0),
        is_kept=read_switch(os.environ, "KEEP"),
        is_dry_run=read_switch(os.environ, "DRY_RUN"),
        is_followed=read_switch(os.environ, "FOLLOW", "1"),
        hours=read_hours(os.environ),
        is_again=read_switch(os.environ, "AGAIN"),
    )


@contextmanager
def _output(is_dry_run: bool) -> Iterator[TextIO | None]:
    """With OUTPUT=yaml, stdout is for what would be sent alone, and all words go to stderr."""
    output = os.environ.get("OUTPUT", "")
    if output not in ("", "yaml"):
        raise RecipeError(f"OUTPUT={output}: yaml is what there is")
    if output and not is_dry_run:
        raise RecipeError("OUTPUT=yaml writes what would be applied: DRY_RUN=1 OUTPUT=yaml")
    if not output:
        yield None
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield stdout


def _stage() -> Stage:
    return require_stage_name(os.environ.get("STAGE", ""))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
