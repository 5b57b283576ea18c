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
    """The variables of a deploy command, which the commands explain; None, or empty, where they are not given.

    Raises `RecipeError` for arguments that the deployment itself sets.
    """

    stage: Stage
    recipe: RequestedRecipe | None = None
    tag: str = ""
    nodes: int | None = None
    mode: ClusterMode | None = None
    arguments: tuple[str, ...] | None = None
    retries: int | None = None
    start_timeout_seconds: int | None = None
    loss_timeout_seconds: int | None = None
    drain_seconds: int | None = None
    is_kept: bool = False
    is_dry_run: bool = False
    is_followed: bool = True
    hours: float | None = None
    is_again: bool = False
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
