"""A one-off request: a subcommand of a stage that a person wants to run in a short Job, on any target."""

from __future__ import annotations

import getpass
import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from deploy.client.requested_recipe import RequestedRecipe
from services.common.errors import RecipeError
from services.common.process.subcommands import SUBCOMMANDS, WITH_RECIPE, require_subcommand
from services.common.recipe.schema import Stage

HOURS = 6.0
"""Limit of a one-off whose request has none, in hours."""
MAX_HOURS = 48
"""Longest limit of a one-off, in hours. On KubeRay the admission policy `millrace-jobs` enforces it for Jobs."""


@dataclass(frozen=True)
class OneOffRequest:
    """The variables of `make stage-run`; None, or empty, for each that was not given.

    Raises `RecipeError` for a subcommand or a limit that cannot be.
    """

    stage: Stage
    words: tuple[str, ...]
    """COMMAND: the subcommand and its arguments."""
    recipe: RequestedRecipe | None = None
    tag: str = ""
    hours: float = HOURS
    memory_gib: int | None = None
    start_timeout_seconds: int | None = None
    is_dry_run: bool = False
    is_followed: bool = True

    def __post_init__(self) -> None:
        if not self.words:
            raise RecipeError(f"COMMAND= is empty: expected one of {', '.join(SUBCOMMANDS[self.stage])}")
        if own := {word.partition("=")[0] for word in self.words} & {"--recipe", "--root"}:
            raise RecipeError(f"COMMAND: stage-run itself sets {', '.join(own)}; RECIPE= names a recipe")
        if not 60 <= self.seconds <= MAX_HOURS * 3600:
            raise RecipeError(f"HOURS={self.hours:g}: a one-off takes from a minute to {MAX_HOURS} hours")

    @property
    def seconds(self) -> int:
        return round(self.hours * 3600)


@dataclass(frozen=True)
class PreparedOneOff:
    """What a one-off runs in its image, on any target."""

    words: tuple[str, ...]
    """The subcommand with its recipe's overrides before its own arguments: the last of two for one key wins."""
    recipe: RequestedRecipe | None
    """None for a subcommand that reads none."""
    digest: str
    """Of the request and its user: a second identical request follows the first one's Job."""
    plan: list[str]
    """Lines of the plan about it."""


def prepare_one_off(request: OneOffRequest, image: str, find_recipe: Callable[[], RequestedRecipe]) -> PreparedOneOff:
    """Prepare the request for an image; `find_recipe` gives the recipe where RECIPE names none.

    Raises `RecipeError` for a subcommand that this checkout's stage lacks; the image checks again at its start.
    """
    subcommand, *arguments = request.words
    require_subcommand(request.stage, subcommand)
    recipe = (request.recipe or find_recipe()).with_overrides_only() if subcommand in WITH_RECIPE else None
    words = (subcommand, *(recipe.arguments if recipe else ()), *arguments)
    asked = [request.stage, image, *words, "", recipe.text if recipe else "", getpass.getuser()]
    asked_json = json.dumps([*asked, request.memory_gib, request.seconds])
    plan = [
        f"runs        {request.stage}: {shlex.join(words)}",
        f"image       {image}",
        f"recipe      {recipe.describe() if recipe else 'none: the subcommand takes none'}",
    ]
    return PreparedOneOff(words, recipe, hashlib.sha256(asked_json.encode()).hexdigest()[:16], plan)
