"""The variables of the deploy commands: which command takes which, on which target. None is ignored silently.

Make exports the variables of its own command line, so that these and the environment's look the same here. Only for
make's own is it certain that a person meant this command, and so only there an unknown name is an error.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import RecipeError

LOCAL = "local"
"""The target that runs stages on this machine, where nothing is deployed."""
CLUSTERS = ("kuberay", "batch")
TARGETS = (*CLUSTERS, LOCAL)
DEPLOYING = ("deploy-stage", "rollback-stage", "pipeline")
ONE_OFF = "stage-run"
PIPELINE, DEMO = "pipeline", "demo"
COMMANDS = (*DEPLOYING, ONE_OFF, "stage-status", "stage-logs", "stop-stage", DEMO)
ON_CLUSTERS = tuple(command for command in COMMANDS if command != DEMO)
ON_LOCAL = (PIPELINE, DEMO)
NAMED_IN_MAKE = "MAKE_VARIABLES"
"""The variable in which the Makefile passes the names that make's own command line set."""
OTHER_PROGRAMS = re.compile(
    r"[^A-Z].*|\w*_PROXY|(TORCH|UV|PIP|AWS|SSL|REQUESTS|GIT)_\w*|TORCH|PYTHON|PYENV_ROOT|CXX|CA_BUNDLE|KUBECONFIG|"
    r"HOME|PATH|SHELL|TMPDIR"
)
"""Names that make's command line may set for other programs: `./bootstrap`, and the libraries for AWS and Kubernetes.
The Makefile's own variables begin with a lower-case letter."""


@dataclass(frozen=True)
class Variable:
    """The commands and targets that take one variable. The Makefile's comments explain it."""

    commands: tuple[str, ...]
    targets: tuple[str, ...] = CLUSTERS
    advice: str = ""
    """Help for a person who gives the variable to a command or a target that does not take it."""
    on_local: tuple[str, ...] = ()
    """Commands that take it on this machine."""

    def is_taken(self, command: str, target: str) -> bool:
        if target == LOCAL:
            return command in self.on_local
        return command in self.commands and target in self.targets


VARIABLES = {
    "STAGE": Variable(
        ("deploy-stage", "rollback-stage", ONE_OFF, "stage-logs", "stop-stage"),
        advice="pipeline and stage-status cover all stages; make deploy-stage STAGE=... deploys one",
    ),
    "TARGET": Variable(
        ON_CLUSTERS,
        advice="on this machine only a pipeline runs; a stage runs alone as python -m services.STAGE --recipe FILE",
        on_local=(PIPELINE,),
    ),
    "COMMAND": Variable((ONE_OFF,), advice="a deployment runs the stage itself; ARGS= are its options"),
    "MEMORY": Variable(
        (ONE_OFF,),
        ("kuberay",),
        "on Batch a subcommand has a whole node of CPU_QUEUE, and a deployment has whole nodes everywhere",
    ),
    "RECIPE": Variable((*DEPLOYING, ONE_OFF), on_local=ON_LOCAL),
    "ROOT": Variable((), advice="the cluster's manifests, or CONFIG on Batch, name the root", on_local=ON_LOCAL),
    "TAG": Variable(
        ("deploy-stage", ONE_OFF),
        advice="it names the image of one stage: make deploy-stage STAGE=... TAG=...",
    ),
    "NODES": Variable(
        DEPLOYING,
        advice="this machine is one node, and so is a subcommand's; ARGS=--parallel.data_parallel_size=... sets a "
        "local trainer's workers",
    ),
    "ARGS": Variable(DEPLOYING, advice="the options of a subcommand are part of COMMAND=", on_local=ON_LOCAL),
    "RETRIES": Variable(DEPLOYING, advice="repeat the command for a subcommand that ended with 75"),
    "DRY_RUN": Variable((*DEPLOYING, ONE_OFF), on_local=(PIPELINE,)),
    "OUTPUT": Variable((*DEPLOYING, ONE_OFF)),
    "FOLLOW": Variable((*DEPLOYING, ONE_OFF)),
    "MODE": Variable(DEPLOYING, ("kuberay",), "on Batch each job has a Ray cluster of its own"),
    "WAIT": Variable(
        (*DEPLOYING, ONE_OFF),
        ("kuberay",),
        "on Batch the job's queue limits the wait for nodes (2 hours without capacity), and an attempt whose nodes "
        "have not all joined within 15 minutes is tried again; make stop-stage ends the wait, HOURS= limits the cost "
        "of an attempt",
    ),
    "WAIT_AFTER_LOSS": Variable(
        DEPLOYING,
        ("kuberay",),
        "on Batch a job that lost a host returns all of its hosts, and its next attempt waits in the queue as the "
        "first one did; the queue cancels it after 2 hours without capacity. Deploy it again then: it continues from "
        "its checkpoint",
    ),
    "DRAIN": Variable(DEPLOYING, ("kuberay",), "on Batch the stop timeout of the machines is the notice"),
    "KEEP": Variable(
        ("deploy-stage", "rollback-stage"),
        ("kuberay",),
        "on Batch a job's nodes stop some minutes after the job, and a pipeline ends each stage before the next",
    ),
    "HOURS": Variable(
        (*DEPLOYING, ONE_OFF), advice="on this machine the recipe's train.time_limit_seconds limits the trainer"
    ),
    "AGAIN": Variable(
        DEPLOYING,
        ("batch",),
        "it applies to TARGET=batch only; on KubeRay the stage itself ends at once where its artifact is published",
    ),
    "CONFIG": Variable(
        ON_CLUSTERS,
        ("batch",),
        "it applies to TARGET=batch only; on KubeRay KUBECONFIG names the cluster",
    ),
}
SWITCHES = ("DRY_RUN", "FOLLOW", "KEEP", "AGAIN")
"""Variables that are 0 or 1."""


def require_taken(command: str, environment: Mapping[str, str]) -> None:
    """Raise `RecipeError` for a variable that was given and that the command does not take on its target.

    An empty value counts as not given, and so does the 0 of a switch that is off by default.
    """
    target = LOCAL if command == DEMO else read_target(environment)
    for name in SWITCHES:
        read_switch(environment, name)
    taken = [name for name, each in VARIABLES.items() if each.is_taken(command, target)]
    known = f"{command} takes {', '.join(taken)} with TARGET={target}"
    for name, variable in VARIABLES.items():
        if name not in taken and _is_given(environment, name):
            advice = f": {variable.advice}" if variable.advice else ""
            raise RecipeError(
                f"{name}={_shorten(environment[name])} does not apply to {command} with TARGET={target}{advice}. "
                f"{known}"
            )
    for name in environment.get(NAMED_IN_MAKE, "").split():
        if name not in VARIABLES and not OTHER_PROGRAMS.fullmatch(name):
            near = difflib.get_close_matches(name, taken, n=1)
            meant = f", do you mean {near[0]}?" if near else "."
            raise RecipeError(f"{command} has no variable {name}{meant} {known}")


def describe_repetition(command: str, environment: Mapping[str, str]) -> str:
    """The command with its given variables, as a person types it again."""
    target = LOCAL if command == DEMO else read_target(environment)
    given = [
        f"{name}={shlex.quote(environment[name])}"
        for name, each in VARIABLES.items()
        if each.is_taken(command, target) and _is_given(environment, name)
    ]
    return " ".join(["make", command, *given])


def read_target(environment: Mapping[str, str]) -> str:
    """The target's name. Raises `RecipeError` for an unknown one."""
    name = environment.get("TARGET") or TARGETS[0]
    if name not in TARGETS:
        raise RecipeError(f"TARGET={_shorten(name)}: expected {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    return name


def read_switch(environment: Mapping[str, str], name: str, default: str = "0") -> bool:
    """Whether the variable is 1. Raises `RecipeError` for a value that is neither 0 nor 1."""
    text = environment.get(name) or default
    if text not in ("0", "1"):
        raise RecipeError(f"{name}={_shorten(text)}: expected 0 or 1")
    return text == "1"


def read_number(environment: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """A whole number below 10^9; None where the variable was not given. Raises `RecipeError` for any other value."""
    text = environment.get(name)
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise RecipeError(f"{name}={_shorten(text)}: expected a whole number from {least} on, of at most nine digits")
    return int(text)


def read_hours(environment: Mapping[str, str]) -> float | None:
    """HOURS; None where it was not given. Raises `RecipeError` for a value that is no number above 0."""
    text = environment.get("HOURS")
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < 1e6:
        raise RecipeError(f"HOURS={_shorten(text)}: expected a number of hours above 0, such as 24")
    return hours


def read_words(name: str, text: str) -> tuple[str, ...]:
    """The words of a variable, split as a shell splits them; no shell sees them. Raises `RecipeError`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise RecipeError(f"{name}={text}: {error}") from error


def _is_given(environment: Mapping[str, str], name: str) -> bool:
    off = ("", "0") if name in SWITCHES and name != "FOLLOW" else ("",)
    return environment.get(name, "") not in off


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text):,} characters)"
