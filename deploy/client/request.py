"""A deploy request: what a person typed, for any target."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.client.outline import Outline, read_outline, read_outline_of_text
from services.common.errors import RecipeError
from services.common.input.files import read_file
from services.common.process.command_line import read_override
from services.common.recipe.file import MAX_RECIPE_BYTES, load_recipe
from services.common.recipe.schema import STAGES
from services.common.recipe.schema import Stage as StageName

DEFAULT_RECIPE = Path("recipes/tiny-cpu.toml")
RESERVED_OPTIONS = ("--recipe", "--root", "--launch", "--dry-run")
Mode = Literal["shared", "isolated"]


LOSS_TIMEOUT_SECONDS = 6 * 3600
"""Seconds for which a deployment waits for nodes after it lost some: node repair, a capacity pool, or a person in the
morning brings them, and the others are held meanwhile."""


@dataclass(frozen=True)
class DeployRequest:
    """A command's variables; None where one was not given."""

    stage: str
    recipe: Path | None
    tag: str
    nodes: int | None
    mode: Mode | None
    arguments: tuple[str, ...] | None
    retries: int
    start_timeout_seconds: int
    drain_seconds: int
    is_kept: bool
    """KEEP=1: the pods stay up afterwards."""
    is_dry_run: bool
    is_followed: bool
    recipe_text: str = ""
    """Instead of a file."""
    hours: float | None = None
    """HOURS: after which an attempt is ended."""
    loss_timeout_seconds: int = LOSS_TIMEOUT_SECONDS
    """WAIT_AFTER_LOSS: for how long a gang is waited for that has stood before."""
    is_again: bool = False
    """AGAIN=1: also where the same was deployed before and ended well."""


def require_stage_name(name: str) -> StageName:
    if name not in STAGES:
        raise RecipeError(f"STAGE={name or 'nothing'}: a stage is one of {', '.join(STAGES)}")
    return name


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def recipe_overrides(arguments: tuple[str, ...]) -> dict[str, str]:
    """Those of a stage's options that override the recipe: `--train.max_steps=500`."""
    return dict(filter(None, map(read_override, arguments)))


def require_free_arguments(arguments: tuple[str, ...]) -> None:
    """Raises `RecipeError` for options that the deployment itself gives."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in RESERVED_OPTIONS:
            raise RecipeError(f"ARGS: {option} is the deployment's own; RECIPE=, NODES=, DRY_RUN=1 say what you mean")
        if "." in option and option.startswith("--") and "=" not in argument:
            raise RecipeError(f"ARGS: {argument!r}: a recipe override reads --section.key=value")


def read_request_outline(request: DeployRequest, text: str, arguments: tuple[str, ...]) -> Outline:
    """From the file that was named, so that an error names it; from the text where there is no file."""
    overrides = recipe_overrides(arguments)
    if request.recipe_text:
        return read_outline_of_text(text, overrides)
    file = request.recipe or DEFAULT_RECIPE
    if not request.tag:
        load_recipe(file, overrides)
    return read_outline(file, overrides)


def read_recipe_text(path: Path) -> str:
    try:
        return read_file(path, max_bytes=MAX_RECIPE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        read_outline(path, {})  # says what is wrong with the file
        raise
