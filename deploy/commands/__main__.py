"""Deploys stages: `python -m deploy.commands COMMAND`, on KubeRay, on AWS Batch, or a pipeline on this machine.

Each variable of make is an option and an environment variable. None is ignored silently: a command refuses one that
does not apply to its target, and names on make's own command line that it does not have.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

import typer
from typer.core import TyperCommand

from deploy.client.one_off_request import OneOffRequest
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from deploy.stage_contract import ClusterMode
from services.common.errors import RecipeError
from services.common.process.command_line import make_app, positive, run_app
from services.common.process.entry_point import COMMAND_VARIABLE, exit_code_of, run_main
from services.common.recipe.schema import STAGES, Stage

if TYPE_CHECKING:
    from deploy.batch.batch_target import BatchTarget
    from deploy.local.local_pipeline import LocalPipeline
    from k8s.client.kuberay_target import KubeRayTarget

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


def _variable(name: str, kind: Any, text: str, default: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Type and option of a variable."""
    option = f"--{name.lower().replace('_', '-')}"
    option += f"/--no{option[1:]}" if default is True else ""
    settings |= {"envvar": name, "help": text, "show_default": default not in (None, False)}
    value = default if "default_factory" not in settings else ...
    return kind | None if default is None else kind, typer.Option(value, option, **settings)


VARIABLES = {
    "stage": _variable("STAGE", Stage, "the stage", ...),
    "words": _variable("COMMAND", str, "the subcommand and its options, without --recipe and --root", ...),
    "target": _variable("TARGET", Target, "where stages run; local is this machine, for pipeline", "kuberay"),
    "recipe": _variable("RECIPE", Path, "the recipe; default: the overlay's, on Batch Llama 2 7B", metavar="FILE"),
    "root": _variable("ROOT", Path, "the folder for all artifacts", metavar="FOLDER"),
    "tag": _variable("TAG", str, "the stage's image", metavar="TAG|DIGEST|IMAGE"),
    "nodes": _variable("NODES", int, "the trainer's nodes, also for the compiler; for STAGE=tokenizer its own", min=1),
    # An empty ARGS= is given, too: rollback-stage then repeats no options. The environment's empty values are not.
    "arguments": _variable(
        "ARGS", str, "recipe overrides and other options of the stage", default_factory=lambda: os.environ.get("ARGS")
    ),
    "retries": _variable("RETRIES", int, "further attempts after exit code 75; default: 3", min=0),
    "is_dry_run": _variable("DRY_RUN", bool, "show the plan, and change nothing", False),
    "output": _variable("OUTPUT", Literal["yaml"], "with DRY_RUN=1: write what would be applied to stdout"),
    "is_followed": _variable("FOLLOW", bool, "follow the stage to its end", True),
    "hours": _variable("HOURS", float, "limit of a stage, of its attempt, or of a subcommand", callback=positive),
    "memory_gib": _variable("MEMORY", int, "memory of the subcommand, in GiB; KubeRay only", min=1),
    "mode": _variable("MODE", ClusterMode, "isolated: a Ray cluster for this stage alone; KubeRay only"),
    "start_timeout_seconds": _variable(
        "WAIT", int, "limit for placing the nodes at first, in seconds; default: 1800; KubeRay only", min=0
    ),
    "loss_timeout_seconds": _variable(
        "WAIT_AFTER_LOSS", int, "limit for replacing lost nodes, in seconds; default: 21600; KubeRay only", min=0
    ),
    "drain_seconds": _variable(
        "DRAIN", int, "grace period before a pod ends, in seconds; default: measured; KubeRay only", min=1
    ),
    "is_kept": _variable("KEEP", bool, "leave the pods and their nodes up after the stage; KubeRay only", False),
    "is_again": _variable("AGAIN", bool, "redeploy even if it already succeeded; Batch only", False),
    "config": _variable("CONFIG", Path, "the account's queues and roles; Batch only", metavar="FILE"),
}
"""The variables, by the attribute of the request that they set."""
ONLY_ON: dict[str, tuple[Target, ...]] = {
    "ROOT": ("local",),
    **dict.fromkeys(("NODES", "RETRIES", "OUTPUT", "FOLLOW", "HOURS"), ("kuberay", "batch")),
    **dict.fromkeys(("MEMORY", "MODE", "WAIT", "WAIT_AFTER_LOSS", "DRAIN", "KEEP"), ("kuberay",)),
    **dict.fromkeys(("AGAIN", "CONFIG"), ("batch",)),
}
"""Targets of the variables that do not apply to all."""


def explain_inapplicable(name: str, command: str, target: Target) -> str:
    """The reason why a variable does not apply to the command on the target; empty for one that does."""
    if target == "local" and command != "pipeline":
        return "on this machine only a pipeline runs; a stage runs alone as millrace tokenize|compile|train RECIPE"
    targets = ONLY_ON.get(name, TARGETS)
    return "" if target in targets else f"it is for TARGET={' and TARGET='.join(targets)}"


def write_given(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables with another value than their default, as a person types them."""
    given = {VARIABLES[each][1]: value for each, value in values.items()}
    return {
        option.envvar: shlex.quote(str(int(value) if isinstance(value, bool) else value))
        for option, value in given.items()
        if value not in (None, option.default)
    }


Request = TypeVar("Request", DeployRequest, OneOffRequest)
app = make_app()
DEMO_RECIPE, DEMO_ROOT = Path("recipes/tiny-cpu.toml"), Path("fsx")
DEPLOYING = (
    *("target", "recipe", "nodes", "arguments", "retries", "is_dry_run", "output", "is_followed", "mode"),
    *("start_timeout_seconds", "loss_timeout_seconds", "drain_seconds", "hours", "is_again", "config"),
)


class Given:
    """The variables of a command, which apply to its target."""

    def __init__(self, command: str, values: dict[str, Any]) -> None:
        self._values, given = values, write_given(values)
        self.target = values.get("target", "local")
        for name, value in sorted(given.items(), key=lambda each: each[0] != "TARGET") if command != "demo" else ():
            if reason := explain_inapplicable(name, command, self.target):
                on = "" if name == "TARGET" else f" with TARGET={self.target}"
                raise RecipeError(f"{name}={value} does not apply to {command}{on}: {reason}")
        by_make = " ".join(["make", command, *(f"{name}={value}" for name, value in given.items())])
        self.repetition = os.environ.get(COMMAND_VARIABLE, by_make)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def request(self, kind: type[Request], **changes: Any) -> Request:
        """The request for a target. Raises `RecipeError` for a recipe or words that cannot be read."""
        given = {each.name: value for each in fields(kind) if (value := self._values.get(each.name)) is not None}
        if "recipe" in given:
            given["recipe"] = read_requested_recipe(given["recipe"])
        for name in given.keys() & {"arguments", "words"}:
            try:
                given[name] = tuple(shlex.split(given[name]))  # no shell sees the words
            except ValueError as error:
                raise RecipeError(f"{VARIABLES[name][1].envvar}={given[name]}: {error}") from error
        return kind(**given | changes)

    def local_pipeline(self) -> LocalPipeline:
        from deploy.local.local_pipeline import LocalPipeline  # noqa: PLC0415 - with rich, only where it runs

        arguments = self.request(DeployRequest, stage=STAGES[0], recipe=None).arguments or ()
        return LocalPipeline(self["recipe"] or DEMO_RECIPE, self["root"] or DEMO_ROOT, arguments, self.repetition)

    def connect(self) -> KubeRayTarget | BatchTarget:
        if self.target == "kuberay":
            # Each target needs libraries that the other can do without.
            from k8s.client.kuberay_target import KubeRayTarget  # noqa: PLC0415
            from k8s.objects.api import connect  # noqa: PLC0415

            return KubeRayTarget(connect())
        from deploy.batch.batch_target import connect_batch  # noqa: PLC0415

        return connect_batch(self["config"])

    @contextmanager
    def output(self) -> Iterator[TextIO | None]:
        """Open stdout for the manifests of OUTPUT=yaml, while messages go to stderr; None without OUTPUT=yaml."""
        if self["output"] is None:
            yield None
            return
        if not self["is_dry_run"]:
            raise RecipeError("OUTPUT=yaml writes what would be applied, and needs DRY_RUN=1")
        stdout = sys.stdout
        with redirect_stdout(sys.stderr):
            yield stdout


class _Command(TyperCommand):
    """Refuses a name on make's own command line that it does not have.

    Only there it is certain that a person meant this command: the environment may have names for others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [str(each.envvar) for each in self.params if each.envvar]
        for name in os.environ.get(NAMED_IN_MAKE, "").split():
            if name not in known and not OTHER_PROGRAMS.fullmatch(name):
                raise RecipeError(f"{self.name} has no variable {name}: it takes {', '.join(known)}")
        return super().parse_args(ctx, args)


def _command(name: str, *variables: str) -> Callable[[Callable[[Given], int]], Callable[[Given], int]]:
    """Register a command that takes these variables, as options and from the environment."""

    def register(run: Callable[[Given], int]) -> Callable[[Given], int]:
        def call(**values: Any) -> int:
            return run(Given(name, values))

        taken = ((each, *VARIABLES[each]) for each in variables)
        call.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(each, Parameter.KEYWORD_ONLY, default=option, annotation=kind) for each, kind, option in taken]
        )
        app.command(name, cls=_Command, help=run.__doc__)(call)
        return run

    return register


@_command("deploy-stage", "stage", "tag", *DEPLOYING, "is_kept")
def deploy_stage(given: Given) -> int:
    """Deploy a stage, and follow it to its end."""
    with given.output() as output:
        return given.connect().deploy(given.request(DeployRequest), output)


@_command("rollback-stage", "stage", *DEPLOYING, "is_kept")
def roll_back_stage(given: Given) -> int:
    """Deploy the previous image with which a stage succeeded."""
    with given.output() as output:
        return given.connect().roll_back(given.request(DeployRequest), output)


@_command("pipeline", "root", *DEPLOYING)
def run_pipeline(given: Given) -> int:
    """Run the three stages on a target, in one live view."""
    if given.target == "local":
        from deploy.local.local_pipeline import run_local_pipeline  # noqa: PLC0415

        return run_local_pipeline(given.local_pipeline(), is_dry_run=given["is_dry_run"])
    request = given.request(DeployRequest, stage=STAGES[0], repetition=given.repetition)
    with given.output() as output:
        return given.connect().run_pipeline(request, output)


@_command("demo", "recipe", "root", "arguments")
def run_demo(given: Given) -> int:
    """Tokenize, compile and train a recipe on this machine, and show the run."""
    from deploy.local.local_pipeline import run_local_pipeline  # noqa: PLC0415

    return run_local_pipeline(given.local_pipeline(), is_shown=True)


@_command(
    *("stage-run", "stage", "words", "target", "recipe", "tag", "hours", "memory_gib", "start_timeout_seconds"),
    *("is_dry_run", "output", "is_followed", "config"),
)
def run_one_off(given: Given) -> int:
    """Run a subcommand of a stage in a short job on a CPU node."""
    with given.output() as output:
        return given.connect().run_one_off(given.request(OneOffRequest), output)


@_command("stage-status", "target", "config")
def show_status(given: Given) -> int:
    """Show which stages are deployed, their progress, and how the last ended."""
    return given.connect().show_status()


@_command("stage-logs", "stage", "target", "config")
def show_log(given: Given) -> int:
    """Follow a stage that is deployed."""
    return given.connect().show_log(given["stage"])


@_command("stop-stage", "stage", "target", "config")
def stop_stage(given: Given) -> int:
    """Let a stage commit a checkpoint, then end its deployment."""
    return given.connect().stop(given["stage"])


def main(argv: list[str]) -> int:
    return run_app(app, argv, "deploy.commands")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_main(main, sys.argv[1:])))
