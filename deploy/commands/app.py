"""The commands that deploy stages, on the target that TARGET names, or run a pipeline on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from typer.core import TyperCommand

from deploy.client.one_off_request import OneOffRequest
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import read_requested_recipe
from deploy.commands.variables import VARIABLES, refuse_inapplicable, refuse_unknown, write_given
from services.common.errors import RecipeError
from services.common.process.command_line import make_app
from services.common.recipe.schema import STAGES

if TYPE_CHECKING:
    from deploy.batch.batch_target import BatchTarget
    from deploy.local.local_pipeline import LocalPipeline
    from k8s.client.kuberay_target import KubeRayTarget

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
        if command != "demo":
            refuse_inapplicable(command, self.target, given)
        self.repetition = " ".join(["make", command, *(f"{name}={value}" for name, value in given.items())])

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def request(self, kind: type[Request], **changes: Any) -> Request:
        """The request for a target. Raises `RecipeError` for a recipe or words that cannot be read."""
        given = {each.name: value for each in fields(kind) if (value := self._values.get(each.name)) is not None}
        if "recipe" in given:
            given["recipe"] = read_requested_recipe(given["recipe"])
        for name in given.keys() & {"arguments", "words"}:
            given[name] = _split(VARIABLES[name].name, given[name])
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
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_unknown(str(self.name), [str(each.envvar) for each in self.params if each.envvar])
        return super().parse_args(ctx, args)


def _command(name: str, *variables: str) -> Callable[[Callable[[Given], int]], Callable[[Given], int]]:
    """Register a command that takes these variables, as options and from the environment."""
    taken = {each: VARIABLES[each] for each in variables}

    def register(run: Callable[[Given], int]) -> Callable[[Given], int]:
        def call(**values: Any) -> int:
            return run(Given(name, values))

        call.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(each, Parameter.KEYWORD_ONLY, default=variable.option, annotation=variable.kind)
                for each, variable in taken.items()
            ]
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
    from deploy.local.local_pipeline import run_local_pipeline, show_run  # noqa: PLC0415

    pipeline = given.local_pipeline()
    return run_local_pipeline(pipeline) or show_run(pipeline)


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


def _split(name: str, text: str) -> tuple[str, ...]:
    """The words of a variable, split as a shell splits them; no shell sees them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise RecipeError(f"{name}={text}: {error}") from error
