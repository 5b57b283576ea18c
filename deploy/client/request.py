"""A deploy request: the variables that a person gave, for any target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deploy.client.requested_recipe import TOKENIZER_NODES, RequestedRecipe, read_requested_recipe
from deploy.stage_contract import DEGREE, ClusterMode
from services.common.errors import RecipeError
from services.common.recipe.schema import Stage

RESERVED_OPTIONS = ("--recipe", "--root", "--launch", "--dry-run")
RETRIES = 3
"""Further attempts of a deployment whose request says no number."""


@dataclass(frozen=True)
class DeployRequest:
    """The variables of a deploy command; None, or empty, for each that was not given.

    Raises `RecipeError` for arguments that the deployment itself sets.
    """

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

    def __post_init__(self) -> None:
        for argument in self.arguments or ():
            option = argument.partition("=")[0]
            if option in RESERVED_OPTIONS:
                raise RecipeError(f"ARGS: the deployment itself sets {option}; use RECIPE=, NODES= or DRY_RUN=1")
            if "." in option and option.startswith("--") and "=" not in argument:
                raise RecipeError(f"ARGS: {argument!r}: a recipe override reads --section.key=value")

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
