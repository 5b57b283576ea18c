"""Deploys stages: `python -m deploy.commands COMMAND`, on the target that TARGET names, `kuberay` or `batch`.

With TARGET=local, `pipeline` runs the three stages on this machine; `demo` does so, and shows the run.

The Makefile's targets call it. It reads its variables from the environment; `make help TARGET=deploy-stage` lists them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from deploy.client.one_off_request import read_one_off_request
from deploy.client.request import read_deploy_request, require_stage_name
from deploy.client.variables import (
    DEMO,
    LOCAL,
    PIPELINE,
    describe_repetition,
    read_switch,
    read_target,
    require_taken,
)
from deploy.local.local_pipeline import DEMO_RECIPE, DEMO_ROOT, LocalPipeline, run_local_pipeline, show_run
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_of
from services.common.recipe.schema import STAGES, Stage

if TYPE_CHECKING:
    from deploy.batch.batch_target import BatchTarget
    from k8s.client.kuberay_target import KubeRayTarget


def main(argv: list[str]) -> int:
    commands = {
        "deploy-stage": deploy_stage,
        "stage-status": show_status,
        "stage-logs": show_log,
        "stop-stage": stop_stage,
        "rollback-stage": roll_back_stage,
        "pipeline": run_pipeline,
        "stage-run": run_one_off,
        "demo": run_demo,
    }
    parser = argparse.ArgumentParser(prog="python -m deploy.commands", description=__doc__)
    parser.add_argument("command", choices=commands)
    command = parser.parse_args(argv).command
    require_taken(command, os.environ)
    return commands[command]()


def deploy_stage() -> int:
    request = read_deploy_request(os.environ, _read_stage())
    with _open_output(request.is_dry_run) as output:
        return _connect().deploy(request, output)


def show_status() -> int:
    return _connect().show_status()


def show_log() -> int:
    stage = _read_stage()
    return _connect().show_log(stage)


def stop_stage() -> int:
    stage = _read_stage()
    return _connect().stop(stage)


def roll_back_stage() -> int:
    request = read_deploy_request(os.environ, _read_stage())
    with _open_output(request.is_dry_run) as output:
        return _connect().roll_back(request, output)


def run_pipeline() -> int:
    if read_target(os.environ) == LOCAL:
        return run_local_pipeline(_read_local_pipeline(PIPELINE), is_dry_run=read_switch(os.environ, "DRY_RUN"))
    request = read_deploy_request(os.environ, STAGES[0])
    request = replace(request, repetition=describe_repetition(PIPELINE, os.environ))
    with _open_output(request.is_dry_run) as output:
        return _connect().run_pipeline(request, output)


def run_demo() -> int:
    pipeline = _read_local_pipeline(DEMO)
    return run_local_pipeline(pipeline) or show_run(pipeline)


def run_one_off() -> int:
    request = read_one_off_request(os.environ)
    with _open_output(request.is_dry_run) as output:
        return _connect().run_one_off(request, output)


def _connect() -> KubeRayTarget | BatchTarget:
    if read_target(os.environ) == "kuberay":
        # Each target needs libraries that the other can do without.
        from k8s.client.kuberay_target import KubeRayTarget  # noqa: PLC0415
        from k8s.objects.api import connect  # noqa: PLC0415

        return KubeRayTarget(connect())
    from deploy.batch.batch_target import connect_batch  # noqa: PLC0415

    return connect_batch(Path(os.environ["CONFIG"]) if os.environ.get("CONFIG") else None)


def _read_local_pipeline(command: str) -> LocalPipeline:
    request = read_deploy_request(os.environ, STAGES[0])
    return LocalPipeline(
        recipe=Path(os.environ.get("RECIPE") or DEMO_RECIPE),
        root=Path(os.environ.get("ROOT") or DEMO_ROOT),
        arguments=request.arguments or (),
        repetition=describe_repetition(command, os.environ),
    )


@contextmanager
def _open_output(is_dry_run: bool) -> Iterator[TextIO | None]:
    """Open stdout for the manifests of OUTPUT=yaml, while messages go to stderr; None without OUTPUT=yaml."""
    output = os.environ.get("OUTPUT", "")
    if output not in ("", "yaml"):
        raise RecipeError(f"OUTPUT={output}: expected yaml")
    if output and not is_dry_run:
        raise RecipeError("OUTPUT=yaml writes what would be applied, and needs DRY_RUN=1")
    if not output:
        yield None
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield stdout


def _read_stage() -> Stage:
    return require_stage_name(os.environ.get("STAGE", ""))


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
