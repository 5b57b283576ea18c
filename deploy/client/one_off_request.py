"""A one-off request: a subcommand of a stage that a person wants to run in a short Job, on any target."""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.client.request import require_stage_name
from deploy.client.requested_recipe import RequestedRecipe, read_requested_recipe
from deploy.client.variables import read_hours, read_number, read_switch, read_words
from services.common.errors import DeviceError, RecipeError
from services.common.process.subcommands import LABEL, names_of, reads_recipe, require_subcommand
from services.common.recipe.schema import Stage

HOURS = 6.0
"""Limit of a one-off whose request has none, in hours."""
MAX_HOURS = 48
"""Longest limit of a one-off, in hours. On KubeRay the admission policy `millrace-jobs` enforces it for Jobs."""
OWN_OPTIONS = ("--recipe", "--root")


@dataclass(frozen=True)
class OneOffRequest:
    """The variables of `make stage-run`; None, or empty, for each that was not given."""

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

    @property
    def seconds(self) -> int:
        return round(self.hours * 3600)


def read_one_off_request(environment: Mapping[str, str]) -> OneOffRequest:
    """The request that these variables make. Raises `RecipeError` for a value that cannot be used."""
    stage = require_stage_name(environment.get("STAGE", ""))
    words = read_words("COMMAND", environment.get("COMMAND", ""))
    if not words:
        known = ", ".join(names_of(stage))
        raise RecipeError(f'COMMAND= is not given: make stage-run STAGE={stage} COMMAND="...", with one of {known}')
    for word in words:
        if word.partition("=")[0] in OWN_OPTIONS:
            raise RecipeError(f"COMMAND: stage-run itself sets {word.partition('=')[0]}; RECIPE= names a recipe")
    recipe = environment.get("RECIPE")
    hours = read_hours(environment)
    hours = HOURS if hours is None else hours
    if not 60 <= hours * 3600 <= MAX_HOURS * 3600:
        raise RecipeError(f"HOURS={hours:g}: a one-off takes from a minute to {MAX_HOURS} hours")
    return OneOffRequest(
        stage=stage,
        words=words,
        recipe=read_requested_recipe(Path(recipe)) if recipe else None,
        tag=environment.get("TAG", ""),
        hours=hours,
        memory_gib=read_number(environment, "MEMORY", least=1),
        start_timeout_seconds=read_number(environment, "WAIT"),
        is_dry_run=read_switch(environment, "DRY_RUN"),
        is_followed=read_switch(environment, "FOLLOW", "1"),
    )


def require_known(request: OneOffRequest, image: str, labels: Mapping[str, str]) -> None:
    """Raise `RecipeError` unless the image has the subcommand.

    A label of the image lists its subcommands. Where no labels can be read, as for an image that was loaded onto the
    nodes, this checkout decides, and the image checks again at its start. Raises `DeviceError` for an image that is too
    old for one-offs.
    """
    known = labels.get(LABEL, "").split()
    if labels and not known:
        raise DeviceError(
            f"image {image} is older than stage-run: it has no label {LABEL}. TAG= names another image; make images "
            f"builds that of this checkout"
        )
    require_subcommand(request.stage, request.words[0], known or names_of(request.stage))


def describe_judge(labels: Mapping[str, str]) -> str:
    """A line of the plan where this checkout, and not the image, knows the subcommand; else empty."""
    if labels:
        return ""
    return "judged by   this checkout, since the image's labels cannot be read here; the image checks before it begins"


def needs_recipe(request: OneOffRequest) -> bool:
    """Does the subcommand read a recipe? A subcommand that this checkout does not know is given one."""
    name, *words = request.words
    return reads_recipe(name, words)


def complete_words(request: OneOffRequest, recipe: RequestedRecipe | None) -> tuple[str, ...]:
    """The subcommand with its recipe's overrides before its own arguments: the last of two for one key wins."""
    subcommand, *arguments = request.words
    return (subcommand, *(recipe.arguments if recipe else ()), *arguments)


def identify(request: OneOffRequest, image: str, words: Sequence[str], recipe: RequestedRecipe | None) -> str:
    """Digest of the request and its user: a second identical request follows the first one's Job."""
    told = [request.stage, image, *words, "", recipe.text if recipe else "", getpass.getuser()]
    return hashlib.sha256(json.dumps([*told, request.memory_gib, request.seconds]).encode()).hexdigest()[:16]
