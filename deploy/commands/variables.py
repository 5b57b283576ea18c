"""The variables of the deploy commands: each is an option, and an environment variable that make passes on.

None is ignored silently: a command refuses one that does not apply to its target, and names on make's own command line
that it does not have.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from deploy.stage_contract import ClusterMode
from services.common.errors import RecipeError
from services.common.process.command_line import positive
from services.common.recipe.schema import Stage

Target = Literal["kuberay", "batch", "local"]
TARGETS: tuple[Target, ...] = ("kuberay", "batch", "local")
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
    name: str
    kind: Any
    default: Any
    option: Any


def _variable(name: str, kind: Any, text: str, default: Any = None, **settings: Any) -> Variable:
    option = f"--{name.lower().replace('_', '-')}"
    option += f"/--no{option[1:]}" if default is True else ""
    settings |= {"envvar": name, "help": text, "show_default": default not in (None, False)}
    value = default if "default_factory" not in settings else ...
    return Variable(name, kind | None if default is None else kind, default, typer.Option(value, option, **settings))


VARIABLES = {
    "stage": _variable("STAGE", Stage, "the stage", ...),
    "words": _variable("COMMAND", str, "the subcommand and its options, without --recipe and --root", ...),
    "target": _variable("TARGET", Target, "where stages run; local, this machine: a pipeline alone", "kuberay"),
    "recipe": _variable("RECIPE", Path, "the recipe", metavar="FILE"),
    "root": _variable("ROOT", Path, "the folder for all artifacts", metavar="FOLDER"),
    "tag": _variable("TAG", str, "the stage's image", metavar="TAG|DIGEST|IMAGE"),
    "nodes": _variable("NODES", int, "the trainer's nodes, also for the compiler; the tokenizer's own", min=1),
    # An empty ARGS= is given, too: rollback-stage then repeats no options. The environment's empty values are not.
    "arguments": _variable(
        "ARGS", str, "recipe overrides and other options of the stage", default_factory=lambda: os.environ.get("ARGS")
    ),
    "retries": _variable("RETRIES", int, "further attempts after exit code 75", min=0),
    "is_dry_run": _variable("DRY_RUN", bool, "show the plan, and change nothing", False),
    "output": _variable("OUTPUT", Literal["yaml"], "with DRY_RUN=1: write what would be applied to stdout"),
    "is_followed": _variable("FOLLOW", bool, "follow the stage to its end", True),
    "hours": _variable("HOURS", float, "limit of a stage, of its attempt, or of a subcommand", callback=positive),
    "memory_gib": _variable("MEMORY", int, "memory of the subcommand, in GiB", min=1),
    "mode": _variable("MODE", ClusterMode, "isolated: a Ray cluster for this stage alone"),
    "start_timeout_seconds": _variable("WAIT", int, "limit for placing the nodes at first, in seconds", min=0),
    "loss_timeout_seconds": _variable("WAIT_AFTER_LOSS", int, "limit for replacing lost nodes, in seconds", min=0),
    "drain_seconds": _variable("DRAIN", int, "notice before a pod ends, for a checkpoint, in seconds", min=1),
    "is_kept": _variable("KEEP", bool, "leave the pods and their nodes up after the stage", False),
    "is_again": _variable("AGAIN", bool, "redeploy even if it already succeeded", False),
    "config": _variable("CONFIG", Path, "the account's queues and roles", metavar="FILE"),
}
"""The variables, by the attribute of the request that they set."""
CLUSTERS, KUBERAY, BATCH, LOCAL = TARGETS[:2], TARGETS[:1], TARGETS[1:2], TARGETS[2:]
ONLY_ON: dict[str, tuple[tuple[Target, ...], str]] = {
    "ROOT": (LOCAL, "the cluster's manifests, or CONFIG on Batch, name the root"),
    "NODES": (CLUSTERS, "ARGS=--parallel.data_parallel_size=... sets the workers of a trainer on this machine"),
    "RETRIES": (CLUSTERS, "repeat the command, which continues"),
    "OUTPUT": (CLUSTERS, "nothing is applied on this machine"),
    "FOLLOW": (CLUSTERS, "a pipeline on this machine ends with its command"),
    "HOURS": (CLUSTERS, "on this machine the recipe's train.time_limit_seconds limits the trainer"),
    "MEMORY": (KUBERAY, "on Batch a subcommand has a whole node of CPU_QUEUE"),
    "MODE": (KUBERAY, "on Batch each job has a Ray cluster of its own"),
    "WAIT": (KUBERAY, "on Batch the queue limits the wait (2 hours without capacity); make stop-stage ends it"),
    "WAIT_AFTER_LOSS": (KUBERAY, "on Batch a job that lost a host returns all hosts, and waits in the queue again"),
    "DRAIN": (KUBERAY, "on Batch the stop timeout of the machines is the notice"),
    "KEEP": (KUBERAY, "on Batch a job's nodes stop some minutes after the job"),
    "AGAIN": (BATCH, "on KubeRay the stage itself ends at once where its artifact is published"),
    "CONFIG": (BATCH, "on KubeRay KUBECONFIG names the cluster"),
}
"""Variables that apply to some targets alone, and the advice for a person who gives them for another."""
NOT_LOCAL = "on this machine only a pipeline runs; a stage runs alone as python -m services.STAGE --recipe FILE"


def explain_inapplicable(name: str, command: str, target: Target) -> str:
    """The advice for a variable that does not apply to the command on the target; empty for one that does."""
    if target == "local" and command != "pipeline":
        return NOT_LOCAL
    targets, advice = ONLY_ON.get(name, (TARGETS, ""))
    return "" if target in targets else advice


def refuse_unknown(command: str, known: Sequence[str]) -> None:
    """Raise `RecipeError` for a name on make's own command line that the command does not have.

    Only there it is certain that a person meant this command: the environment may have names for others.
    """
    for name in os.environ.get(NAMED_IN_MAKE, "").split():
        if name not in known and not OTHER_PROGRAMS.fullmatch(name):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"do you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise RecipeError(f"{command} has no variable {name}: {meant}")


def refuse_inapplicable(command: str, target: Target, given: Mapping[str, str]) -> None:
    """Raise `RecipeError` for a variable that does not apply to the command on the target."""
    for name, value in sorted(given.items(), key=lambda each: each[0] != "TARGET"):
        if advice := explain_inapplicable(name, command, target):
            raise RecipeError(f"{name}={value} does not apply to {command} with TARGET={target}: {advice}")


def write_given(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables with another value than their default, as a person types them."""
    given = {VARIABLES[each]: value for each, value in values.items() if value not in (None, VARIABLES[each].default)}
    return {each.name: shlex.quote(str(int(v) if isinstance(v, bool) else v)) for each, v in given.items()}
