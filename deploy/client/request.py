"""A deploy request: the variables that a person typed, for any target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from deploy.client.requested_recipe import TOKENIZER_NODES, RequestedRecipe, read_requested_recipe
from deploy.client.variables import read_hours, read_number, read_switch, read_words
from deploy.stage_contract import DEGREE, ClusterMode
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES, Stage

RESERVED_OPTIONS = ("--recipe", "--root", "--launch", "--dry-run")
RETRIES = 3
"""Further attempts of a deployment whose request says no number."""


@dataclass(frozen=True)
class DeployRequest:
    """The variables of a deploy command; None, or empty, for each that was not given."""

    stage: Stage
    recipe: RequestedRecipe | None = None
    """RECIPE, without ARGS."""
    tag: str = ""
    nodes: int | None = None
    """NODES: nodes of the trainer, also for the compiler; the tokenizer's own for the tokenizer."""
    mode: ClusterMode | None = None
    arguments: tuple[str, ...] | None = None
    """ARGS: options of the stage's command."""
    retries: int | None = None
    start_timeout_seconds: int | None = None
    """WAIT: seconds in which a gang has to be placed before the first attempt."""
    loss_timeout_seconds: int | None = None
    """WAIT_AFTER_LOSS: seconds in which a gang that lost nodes has to be complete again."""
    drain_seconds: int | None = None
    """DRAIN: seconds between a container's notice and its end."""
    is_kept: bool = False
    """KEEP=1: leave the pods up after the stage."""
    is_dry_run: bool = False
    is_followed: bool = True
    hours: float | None = None
    """HOURS: when a deployment on KubeRay, or an attempt on Batch, is ended."""
    is_again: bool = False
    """AGAIN=1: redeploy even if it already succeeded."""
    repetition: str = ""
    """The command that repeats this request, as a person types it."""

    def find_recipe(self, default: Path) -> RequestedRecipe:
        """The request's recipe, or that of the file `default`, with ARGS and NODES. Raises `RecipeError`."""
        recipe = (self.recipe or read_requested_recipe(default)).with_arguments(*(self.arguments or ()))
        return recipe.on_nodes(self.stage, self.nodes)

    def repeat(self, recipe: RequestedRecipe) -> DeployRequest:
        """The request, with recipe, options and nodes of an earlier deployment's `recipe` where it has none."""
        arguments = recipe.arguments
        if self.arguments is not None:
            kept = [each for each in arguments if each.partition("=")[0] in (DEGREE, TOKENIZER_NODES)]
            arguments = (*kept, *self.arguments)
        return replace(self, recipe=self.recipe or replace(recipe, arguments=()), arguments=arguments)

    def of_pipeline(self, stage: Stage) -> DeployRequest:
        """The request for one stage of a pipeline, whose NODES are the trainer's."""
        return replace(self, stage=stage, nodes=None if stage == "tokenizer" else self.nodes)


def read_deploy_request(environment: Mapping[str, str], stage: Stage) -> DeployRequest:
    """The request that these variables make. Raises `RecipeError` for a value that cannot be used."""
    mode, recipe, arguments = environment.get("MODE"), environment.get("RECIPE"), environment.get("ARGS")
    if mode not in (None, "", "shared", "isolated"):
        raise RecipeError(f"MODE={mode}: expected shared or isolated")
    request = DeployRequest(
        stage=stage,
        recipe=read_requested_recipe(Path(recipe)) if recipe else None,
        tag=environment.get("TAG", ""),
        nodes=read_number(environment, "NODES", least=1),
        mode=cast(ClusterMode, mode) if mode else None,
        arguments=read_words("ARGS", arguments) if arguments is not None else None,
        retries=read_number(environment, "RETRIES"),
        start_timeout_seconds=read_number(environment, "WAIT"),
        loss_timeout_seconds=read_number(environment, "WAIT_AFTER_LOSS"),
        drain_seconds=read_number(environment, "DRAIN", least=1),
        is_kept=read_switch(environment, "KEEP"),
        is_dry_run=read_switch(environment, "DRY_RUN"),
        is_followed=read_switch(environment, "FOLLOW", "1"),
        hours=read_hours(environment),
        is_again=read_switch(environment, "AGAIN"),
    )
    _require_free_arguments(request.arguments or ())
    return request


def require_stage_name(name: str) -> Stage:
    """The stage of this name. Raises `RecipeError` for any other name."""
    if name not in STAGES:
        raise RecipeError(f"STAGE={name or 'nothing'}: expected one of {', '.join(STAGES)}")
    return name


def _require_free_arguments(arguments: tuple[str, ...]) -> None:
    """Raise `RecipeError` for options that the deployment itself sets."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in RESERVED_OPTIONS:
            raise RecipeError(f"ARGS: the deployment itself sets {option}; use RECIPE=, NODES= or DRY_RUN=1")
        if "." in option and option.startswith("--") and "=" not in argument:
            raise RecipeError(f"ARGS: {argument!r}: a recipe override reads --section.key=value")
