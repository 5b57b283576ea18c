"""The variables of the deploy commands: which command takes which, on which target. No other is ignored in silence.

Make exports what is named on its command line, so that a variable of the environment and one of `make` are the same
here. Only of the latter is it known that a person meant this command, and so an unknown name is an error there alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.errors import RecipeError

TARGETS = ("kuberay", "batch")
DEPLOYING = ("deploy-stage", "rollback-stage", "pipeline")
ONE_OFF = "stage-run"
COMMANDS = (*DEPLOYING, ONE_OFF, "stage-status", "stage-logs", "stop-stage")
NAMED_IN_MAKE = "MAKE_VARIABLES"
"""The variable in which the Makefile hands over the names that were given on make's own command line."""
ELSEWHERE = re.compile(
    r"[^A-Z].*|\w*_PROXY|(TORCH|UV|PIP|AWS|SSL|REQUESTS|GIT)_\w*|TORCH|PYTHON|PYENV_ROOT|CXX|CA_BUNDLE|KUBECONFIG|"
    r"HOME|PATH|SHELL|TMPDIR"
)
"""Names of variables that make's own command line may have for other programs: `./bootstrap`, AWS' and Kubernetes'
libraries; the Makefile's own begin with a lower-case letter."""


@dataclass(frozen=True)
class Variable:
    """The targets and commands for which one variable has a meaning."""

    commands: tuple[str, ...]
    targets: tuple[str, ...] = TARGETS
    elsewhere: str = ""
    """Advice for a person who gives the variable where it has no meaning."""
    everywhere: tuple[str, ...] = ()
    """Commands for which it has a meaning on every target."""

    def is_taken(self, command: str, target: str) -> bool:
        return command in self.everywhere or (command in self.commands and target in self.targets)


VARIABLES = {
    "STAGE": Variable(
        ("deploy-stage", "rollback-stage", ONE_OFF, "stage-logs", "stop-stage"),
        elsewhere="pipeline and stage-status are about all stages: make deploy-stage STAGE=... is about one",
    ),
    "TARGET": Variable(COMMANDS),
    "COMMAND": Variable((ONE_OFF,), elsewhere="what a deployment runs is the stage itself; its options are ARGS="),
    "BRING": Variable((ONE_OFF,), elsewhere="files come home from a subcommand: make stage-run"),
    "TO": Variable((ONE_OFF,), elsewhere="files come home from a subcommand: make stage-run"),
    "MEMORY": Variable(
        (ONE_OFF,),
        ("kuberay",),
        "on Batch a subcommand has a whole node of CPU_QUEUE, and a deployment has whole nodes everywhere",
    ),
    "RECIPE": Variable((*DEPLOYING, ONE_OFF)),
    "TAG": Variable(
        ("deploy-stage", ONE_OFF), elsewhere="it is one stage's image: make deploy-stage STAGE=... TAG=..."
    ),
    "NODES": Variable(
        ("deploy-stage", "rollback-stage"),
        elsewhere="it is one stage's: make deploy-stage STAGE=... NODES=..., or say the nodes in the recipe",
    ),
    "ARGS": Variable(DEPLOYING, elsewhere="the options of a subcommand are part of COMMAND="),
    "RETRIES": Variable(DEPLOYING, elsewhere="a subcommand that ends with 75 is typed again"),
    "DRY_RUN": Variable((*DEPLOYING, ONE_OFF)),
    "OUTPUT": Variable((*DEPLOYING, ONE_OFF)),
    "FOLLOW": Variable((*DEPLOYING, ONE_OFF)),
    "MODE": Variable(DEPLOYING, ("kuberay",), "on Batch each job has a Ray cluster of its own"),
    "WAIT": Variable(
        (*DEPLOYING, ONE_OFF),
        ("kuberay",),
        "on Batch the job's queue says how long a job waits for nodes (2 hours without capacity), and an attempt whose "
        "nodes have not all joined within 15 minutes is tried again; make stop-stage ends the wait, HOURS= bounds what "
        "an attempt costs",
    ),
    "WAIT_AFTER_LOSS": Variable(
        DEPLOYING,
        ("kuberay",),
        "on Batch a job that lost a host gives all of them back, and its next attempt waits in the queue as its first "
        "did, which cancels it after 2 hours without capacity: deploy it again, and it goes on from its checkpoint",
    ),
    "DRAIN": Variable(DEPLOYING, ("kuberay",), "on Batch the notice is the stop timeout of the machines"),
    "KEEP": Variable(
        ("deploy-stage", "rollback-stage"),
        ("kuberay",),
        "on Batch a job's nodes go some minutes after it, and a pipeline takes each stage down before the next",
    ),
    "HOURS": Variable(
        DEPLOYING,
        ("batch",),
        "on KubeRay the recipe's train.time_limit_seconds ends the trainer in time",
        everywhere=(ONE_OFF,),
    ),
    "AGAIN": Variable(DEPLOYING, ("batch",), "on KubeRay the stage itself says whether there is anything to do"),
    "CONFIG": Variable(COMMANDS, ("batch",), "on KubeRay KUBECONFIG names the cluster"),
}
SWITCHES = ("DRY_RUN", "FOLLOW", "KEEP", "AGAIN")
"""Variables that are 0 or 1."""


def require_taken(command: str, environment: Mapping[str, str]) -> None:
    """Raise `RecipeError` for a variable that was given, and for which the command has no use on the target.

    An empty value, and 0 for what is off unless it is 1, are those of a variable that was not given.
    """
    target = read_target(environment)
    for name in SWITCHES:
        read_switch(environment, name)
    taken = [name for name, each in VARIABLES.items() if each.is_taken(command, target)]
    there_are = f"{command} takes {', '.join(taken)} with TARGET={target}"
    for name, variable in VARIABLES.items():
        if name not in taken and _is_given(environment, name):
            advice = f": {variable.elsewhere}" if variable.elsewhere else ""
            raise RecipeError(
                f"{name}={_shorten(environment[name])} is not for {command} with TARGET={target}{advice}. {there_are}"
            )
    for name in environment.get(NAMED_IN_MAKE, "").split():
        if name not in VARIABLES and not ELSEWHERE.fullmatch(name):
            near = difflib.get_close_matches(name, taken, n=1)
            meant = f", do you mean {near[0]}?" if near else "."
            raise RecipeError(f"{name} is no variable of {command}{meant} {there_are}")


def read_target(environment: Mapping[str, str]) -> str:
    """The target's name. Raises `RecipeError` for one that there is not."""
    name = environment.get("TARGET") or TARGETS[0]
    if name not in TARGETS:
        raise RecipeError(f"TARGET={_shorten(name)}: {' or '.join(TARGETS)}")
    return name


def read_switch(environment: Mapping[str, str], name: str, default: str = "0") -> bool:
    """Is it 1? Raises `RecipeError` for what is neither 0 nor 1."""
    text = environment.get(name) or default
    if text not in ("0", "1"):
        raise RecipeError(f"{name}={_shorten(text)}: 0 or 1 is expected")
    return text == "1"


def read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Raises `RecipeError` for what is no whole number below a thousand million."""
    text = environment.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise RecipeError(f"{name}={_shorten(text)}: a whole number of at most nine digits is expected")
    return int(text)


def read_hours(environment: Mapping[str, str]) -> float | None:
    """HOURS; None where it was not given. Raises `RecipeError` for what is no number above 0."""
    text = environment.get("HOURS", "")
    if not text:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours < 1e6:
        raise RecipeError(f"HOURS={_shorten(text)}: a number of hours above 0 is expected, such as 24")
    return hours


def _is_given(environment: Mapping[str, str], name: str) -> bool:
    off = ("", "0") if name in SWITCHES and name != "FOLLOW" else ("",)
    return environment.get(name, "") not in off


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text):,} characters)"
