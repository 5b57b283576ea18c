"""Job definitions of the stages, and of a stand-in for one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deploy.batch.job_definition import JobSpec, read_container, render_job_definition
from infra.tests.batchsim.job import JobDefinition
from services.common.launch.batch.node import ROOT_MARKER
from services.common.process.subcommands import ON_BATCH
from services.common.recipe.schema import Stage
from tests.deploy.batch.builders import DIGEST, REGISTRY, config_of, job_spec_of

# As many as one trainer takes; torch spins where there are more threads than cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60"}


def make_root(folder: Path) -> Path:
    """A mounted file system's root."""
    folder.mkdir(parents=True)
    (folder / ROOT_MARKER).touch()
    return folder


def define_stage(stage: Stage, recipe: Path, root: Path, *arguments: str, **settings: Any) -> JobDefinition:
    """The job definition that the deploy tool registers, on two nodes of one CPU each, so that two workers need both.

    What Batch's host does is done here: the image's entry point goes before the command, and /fsx is `root`.
    """
    config = config_of()
    spec = job_spec_of(stage, recipe.read_text(encoding="utf-8"), arguments)
    body = render_job_definition(config, config.cpu, spec)
    container = read_container(body)
    at = container["command"].index("--")
    words = [re.sub("^/fsx", str(root), word) for word in container["command"][at:]]
    variables = {each["name"]: each["value"] for each in container["environment"]}
    return JobDefinition(
        ("python", "-m", f"services.{stage}", ON_BATCH, "--cpus", "1", "--join-seconds", "180", *words),
        environment=variables | ENVIRONMENT,
        attempts=body["retryStrategy"]["attempts"],
        evaluate_on_exit=body["retryStrategy"]["evaluateOnExit"],
        **settings,
    )


def define_one_off(stage: Stage, root: Path, *words: str) -> JobDefinition:
    """The job definition of a subcommand that the deploy tool registers, on one node, with /fsx at `root`."""
    spec = JobSpec(stage, f"{REGISTRY}/{stage}@sha256:{DIGEST}", None, 3_600, words=words, digest="0" * 16)
    body = render_job_definition(config_of(), config_of().cpu, spec)
    container = read_container(body)
    return JobDefinition(
        ("python", "-m", f"services.{stage}", *(re.sub("^/fsx", str(root), word) for word in container["command"])),
        evaluate_on_exit=body["retryStrategy"]["evaluateOnExit"],
        num_nodes=1,
        environment={each["name"]: each["value"] for each in container["environment"]},
        attempts=1,
    )


def define_script(script: Path, root: Path, *, join_seconds: int = 120, **settings: Any) -> JobDefinition:
    """A job whose stage is a Python script."""
    command = ("python", str(script), "-m", "services.tokenizer", "--recipe", "none", "--root", str(root))
    batch = ("python", "-m", "services.common.launch.batch.job", "--join-seconds", str(join_seconds), "--")
    rules = render_job_definition(config_of(), config_of().cpu, job_spec_of())["retryStrategy"]["evaluateOnExit"]
    return JobDefinition((*batch, *command), rules, environment=ENVIRONMENT, **settings)
