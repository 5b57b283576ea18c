"""A one-off: a subcommand of a stage that runs in a short Job, as a person typed it, for any target."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.client.outline import Outline, read_outline, read_outline_of_text
from deploy.client.request import recipe_overrides, require_stage_name, user_name
from deploy.client.variables import read_hours, read_number, read_switch
from services.common.errors import DeviceError, RecipeError, TryAgain
from services.common.input.credentials import WHERE_THEY_BELONG, mask
from services.common.input.files import read_file
from services.common.launch.brought_files import FileReceiver
from services.common.process.subcommands import LABEL, SUBCOMMANDS, names_of, require_subcommand
from services.common.recipe.file import MAX_RECIPE_BYTES
from services.common.recipe.schema import Stage

HOURS = 6.0
"""Hours after which a one-off is ended, unless HOURS says otherwise."""
MOST_HOURS = 48
"""Hours that a one-off may take. On KubeRay the admission policy `millrace-jobs` holds Jobs to it."""
WAIT_SECONDS = 1_800
OWN_OPTIONS = ("--recipe", "--root")
FOLDER = Path("brought")
"""The folder of a person's machine in which each one-off that brings files makes one of its own."""


@dataclass(frozen=True)
class OneOffRequest:
    """The variables of `make stage-run`; None, or empty, where one was not given."""

    stage: Stage
    words: tuple[str, ...]
    """COMMAND: the subcommand and its arguments."""
    recipe: Path | None = None
    tag: str = ""
    bring: tuple[str, ...] = ()
    """BRING: files to bring home, absolute or below the root."""
    folder: Path | None = None
    """TO: where they go."""
    hours: float = HOURS
    memory_gib: int | None = None
    start_timeout_seconds: int = WAIT_SECONDS
    is_dry_run: bool = False
    is_followed: bool = True

    @property
    def seconds(self) -> int:
        return round(self.hours * 3600)


@dataclass(frozen=True)
class OneOffRecipe:
    """The recipe that a subcommand reads."""

    text: str
    overrides: tuple[str, ...]
    """Options that change it: those of the deployment that it is taken from."""
    origin: str
    """Where it comes from, for people."""

    @property
    def outline(self) -> Outline:
        return read_outline_of_text(self.text, recipe_overrides(self.overrides))

    @property
    def described(self) -> str:
        changed = f", with {' '.join(self.overrides)}" if self.overrides else ""
        return f"{self.outline.name}, {self.origin}{changed}"


def read_one_off(environment: Mapping[str, str]) -> OneOffRequest:
    """The request of these variables. Raises `RecipeError` for what cannot be, before anybody is asked."""
    stage = require_stage_name(environment.get("STAGE", ""))
    words = split_words("COMMAND", environment.get("COMMAND", ""))
    if not words:
        known = ", ".join(names_of(stage))
        raise RecipeError(f'COMMAND= is not given: make stage-run STAGE={stage} COMMAND="...", with one of {known}')
    for word in words:
        if word.partition("=")[0] in OWN_OPTIONS:
            raise RecipeError(f"COMMAND: {word.partition('=')[0]} is given by stage-run itself; RECIPE= names a recipe")
    recipe, folder = environment.get("RECIPE"), environment.get("TO")
    hours = read_hours(environment)
    hours = HOURS if hours is None else hours
    if not 60 <= hours * 3600 <= MOST_HOURS * 3600:
        raise RecipeError(f"HOURS={hours:g}: a one-off takes from a minute to {MOST_HOURS} hours")
    return OneOffRequest(
        stage=stage,
        words=words,
        recipe=Path(recipe) if recipe else None,
        tag=environment.get("TAG", ""),
        bring=split_words("BRING", environment.get("BRING", "")),
        folder=Path(folder) if folder else None,
        hours=hours,
        memory_gib=read_number(environment, "MEMORY", 1) if environment.get("MEMORY") else None,
        start_timeout_seconds=read_number(environment, "WAIT", WAIT_SECONDS),
        is_dry_run=read_switch(environment, "DRY_RUN"),
        is_followed=read_switch(environment, "FOLLOW", "1"),
    )


def split_words(variable: str, text: str) -> tuple[str, ...]:
    """The words of a variable as a shell splits them, which no shell ever sees. Raises `RecipeError`."""
    if mask(text) != text:  # they are stored with the Job
        raise RecipeError(f"{variable}: holds a user, a password, a token or a signature. {WHERE_THEY_BELONG}")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise RecipeError(f"{variable}={text}: {error}") from error


def require_known(request: OneOffRequest, image: str, labels: Mapping[str, str]) -> None:
    """Raise `RecipeError` unless the image has the subcommand: its label says so, or this checkout where there is none
    to be read, as of an image that was brought to the nodes. The image itself judges once more before anything begins.

    Raises `DeviceError` for an image of a version without one-offs.
    """
    told = labels.get(LABEL, "").split()
    if labels and not told:
        raise DeviceError(
            f"image {image} is older than stage-run: it has no label {LABEL}. TAG= names another; make images builds "
            f"that of this checkout"
        )
    require_subcommand(request.stage, request.words[0], told or names_of(request.stage))


def describe_judge(labels: Mapping[str, str]) -> str:
    """Who said that the image has the subcommand, where it was not the image: a line of the plan, or nothing."""
    if labels:
        return ""
    return "judged by   this checkout, since the image's labels cannot be read here; the image judges before it begins"


def needs_recipe(request: OneOffRequest) -> bool:
    """Does the subcommand read a recipe? One that this checkout does not know gets one."""
    known = {each.name: each.takes_recipe for each in SUBCOMMANDS[request.stage]}
    return known.get(request.words[0], True)


def read_named_recipe(path: Path) -> OneOffRecipe:
    """The recipe of a file, unchanged. Raises `RecipeError` for one that cannot be read."""
    try:
        text = read_file(path, max_bytes=MAX_RECIPE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path}: no recipe can be read there: {error}. `ls recipes/` shows those that are shipped"
        ) from error
    read_outline(path, {})  # says what is wrong with it
    return OneOffRecipe(text, (), str(path))


def complete_words(request: OneOffRequest, recipe: OneOffRecipe | None) -> tuple[str, ...]:
    """The subcommand with the overrides of its recipe before its own: of two of one key the last one wins."""
    subcommand, *arguments = request.words
    return (subcommand, *(recipe.overrides if recipe else ()), *arguments)


def only_overrides(arguments: Sequence[str]) -> tuple[str, ...]:
    """Of a deployment's options, those that change its recipe."""
    return tuple(each for each in arguments if recipe_overrides((each,)))


def identify(request: OneOffRequest, image: str, words: Sequence[str], recipe: OneOffRecipe | None) -> str:
    """The same for what one person asks for twice: the second time, the first is followed."""
    told = [request.stage, image, *words, "", *request.bring, "", recipe.text if recipe else "", user_name()]
    return hashlib.sha256(json.dumps([*told, request.memory_gib, request.seconds]).encode()).hexdigest()[:16]


class Reception:
    """The output of a one-off as it comes: lines are printed, and files that it brings are kept to be written."""

    def __init__(self, request: OneOffRequest, name: str) -> None:
        self._folder = request.folder or FOLDER / name
        self._receiver = FileReceiver()

    def take(self, line: str) -> None:
        """One line, without its end."""
        if not self._receiver.take(line):
            print(line, flush=True)

    def write(self) -> None:
        """Write the files that have come, over none that is there. Raises `TryAgain` where one did not come whole."""
        files, problems = self._receiver.files()
        for file in files:
            path = _free_path(self._folder / file.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            print(f"brought     {path} ({len(file.content):,} bytes)", flush=True)
        if problems:
            raise TryAgain(
                f"the subcommand is done, and {'; '.join(problems)}. It stays on the shared file system: the same "
                f"command with BRING= brings it"
            )


def _free_path(path: Path) -> Path:
    """The path, or the first one beside it that nothing is at."""
    candidates = [path, *(path.with_stem(f"{path.stem}-{number}") for number in range(2, 1_000))]
    return next(each for each in candidates if not each.exists())
