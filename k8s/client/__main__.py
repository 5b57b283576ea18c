"""Deploys stages on a KubeRay cluster: `python -m k8s.client COMMAND`.

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

from k8s.client.commands import deploy_stage, rollback_stage, run_pipeline, show_log, stop_stage
from k8s.client.overlay import choose_overlay, cluster_down, cluster_up
from k8s.client.request import DeployRequest, require_stage_name
from k8s.client.status import describe_status
from k8s.objects.api import connect
from k8s.objects.deployment import Mode
from services.common.entry_point import exit_code_of
from services.common.errors import RecipeError

START_TIMEOUT_SECONDS = 1800


def main(argv: list[str]) -> int:
    commands = {
        "cluster-up": up,
        "cluster-down": down,
        "deploy-stage": deploy,
        "stage-status": status,
        "stage-logs": logs,
        "stop-stage": stop,
        "rollback-stage": rollback,
        "pipeline": pipeline,
    }
    parser = argparse.ArgumentParser(prog="python -m k8s.client", description=__doc__)
    parser.add_argument("command", choices=commands)
    return commands[parser.parse_args(argv).command]()


def up() -> int:
    """OVERLAY (local), HEAD_TAG (the working tree's)."""
    return cluster_up(connect(), choose_overlay(os.environ.get("OVERLAY") or "local"), os.environ.get("HEAD_TAG", ""))


def down() -> int:
    """OVERLAY (local), FORCE=1."""
    return cluster_down(connect(), choose_overlay(os.environ.get("OVERLAY") or "local"), _is_set("FORCE"))


def deploy() -> int:
    """STAGE, RECIPE, TAG, NODES, MODE=shared|isolated, ARGS, RETRIES, WAIT, DRAIN, KEEP=1, DRY_RUN=1, OUTPUT=yaml,
    FOLLOW=0."""
    request = _read_request(_stage())
    with _manifests(request) as file:
        return deploy_stage(connect(), request, file)


def status() -> int:
    print(describe_status(connect()))
    return 0


def logs() -> int:
    """STAGE."""
    stage = _stage()
    return show_log(connect(), stage)


def stop() -> int:
    """STAGE."""
    stage = _stage()
    return stop_stage(connect(), stage)


def rollback() -> int:
    """STAGE, and all that `deploy-stage` takes but TAG; default: as it was deployed last."""
    request = _read_request(_stage())
    with _manifests(request) as file:
        return rollback_stage(connect(), request, file)


def pipeline() -> int:
    """All that `deploy-stage` takes but STAGE, TAG and NODES."""
    request = _read_request("tokenizer")
    with _manifests(request) as file:
        return run_pipeline(connect(), request, file)


def _read_request(stage: str) -> DeployRequest:
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
        retries=_number("RETRIES", 3),
        start_timeout_seconds=_number("WAIT", START_TIMEOUT_SECONDS),
        drain_seconds=_number("DRAIN", 0),
        is_kept=_is_set("KEEP"),
        is_dry_run=_is_set("DRY_RUN"),
        is_followed=os.environ.get("FOLLOW", "1") != "0",
    )


@contextmanager
def _manifests(request: DeployRequest) -> Iterator[TextIO | None]:
    """With OUTPUT=yaml, stdout is for manifests alone, and all words go to stderr."""
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


def _stage() -> str:
    return require_stage_name(os.environ.get("STAGE", ""))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal():
        raise RecipeError(f"{variable}={text}: a whole number is expected")
    return int(text)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
