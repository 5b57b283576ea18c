"""Deploys stages: `python -m deploy.commands COMMAND`, on the target that TARGET names, `kuberay` or `batch`.

The Makefile's targets call it and say which variables each takes; it reads them from the environment.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from deploy.client.request import DeployRequest, Mode, require_stage_name
from deploy.client.target import Target
from services.common.entry_point import exit_code_of
from services.common.errors import RecipeError
from services.common.recipe import Stage

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
    }
    parser = argparse.ArgumentParser(prog="python -m deploy.commands", description=__doc__)
    parser.add_argument("command", choices=commands)
    return commands[parser.parse_args(argv).command]()


def deploy() -> int:
    """STAGE, RECIPE, TAG, NODES, ARGS, RETRIES, DRY_RUN=1, OUTPUT=yaml, FOLLOW=0.

    On KubeRay MODE=shared|isolated, WAIT, DRAIN, KEEP=1; on Batch HOURS, AGAIN=1, CONFIG.
    """
    request = _read_request(_stage())
    with _output(request) as file:
        return _target().deploy(request, file)


def status() -> int:
    return _target().show_status()


def logs() -> int:
    """STAGE."""
    stage = _stage()
    return _target().show_log(stage)


def stop() -> int:
    """STAGE."""
    stage = _stage()
    return _target().stop(stage)


def rollback() -> int:
    """STAGE, and all that `deploy-stage` takes but TAG; default: as it was deployed last."""
    request = _read_request(_stage())
    with _output(request) as file:
        return _target().roll_back(request, file)


def pipeline() -> int:
    """All that `deploy-stage` takes but STAGE, TAG and NODES."""
    request = _read_request("tokenizer")
    with _output(request) as file:
        return _target().run_pipeline(request, file)


def _target() -> Target:
    name = os.environ.get("TARGET") or "kuberay"
    if name == "kuberay":
        from k8s.client.target import KubeRay  # noqa: PLC0415 - each needs libraries that the other does without
        from k8s.objects.api import connect  # noqa: PLC0415

        return KubeRay(connect())
    if name == "batch":
        from batch.target import connect_batch  # noqa: PLC0415

        return connect_batch(Path(os.environ["CONFIG"]) if os.environ.get("CONFIG") else None)
    raise RecipeError(f"TARGET={name}: kuberay or batch")


def _read_request(stage: Stage) -> DeployRequest:
    mode, recipe, arguments = os.environ.get("MODE"), os.environ.get("RECIPE"), os.environ.get("ARGS")
    if mode not in (None, "", "shared", "isolated"):
        raise RecipeError(f"MODE={mode}: shared or isolated")
    return DeployRequest(
        stage=stage,
        recipe=Path(recipe) if recipe else None,
        tag=os.environ.get("TAG", ""),
        nodes=_number("NODES", 1) if os.environ.get("NODES") else None,
        mode=cast(Mode, mode) if mode else None,
        arguments=_split(arguments) if arguments is not None else None,
        retries=_number("RETRIES", RETRIES),
        start_timeout_seconds=_number("WAIT", START_TIMEOUT_SECONDS),
        drain_seconds=_number("DRAIN", 0),
        is_kept=_is_set("KEEP"),
        is_dry_run=_is_set("DRY_RUN"),
        is_followed=os.environ.get("FOLLOW", "1") != "0",
        hours=_hours(),
        is_again=_is_set("AGAIN"),
    )


@contextmanager
def _output(request: DeployRequest) -> Iterator[TextIO | None]:
    """With OUTPUT=yaml, stdout is for what would be sent alone, and all words go to stderr."""
    output = os.environ.get("OUTPUT", "")
    if output not in ("", "yaml"):
        raise RecipeError(f"OUTPUT={output}: yaml is what there is")
    if output and not request.is_dry_run:
        raise RecipeError("OUTPUT=yaml writes what would be applied: DRY_RUN=1 OUTPUT=yaml")
    if not output:
        yield None
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield stdout


def _split(arguments: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        raise RecipeError(f"ARGS={arguments}: {error}") from error


def _stage() -> Stage:
    return require_stage_name(os.environ.get("STAGE", ""))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise RecipeError(f"{variable}={text}: a whole number is expected")
    return int(text)


def _hours() -> float | None:
    text = os.environ.get("HOURS", "")
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < 1e6:
        raise RecipeError(f"HOURS={text}: a number of hours above 0 is expected, such as 24")
    return hours


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
