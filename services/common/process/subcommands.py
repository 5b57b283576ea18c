"""Lists the subcommands of the stages, `python -m services.<stage> <subcommand> ...`.

`make stage-run` runs one of them on a cluster in a short Job. Its client reads this list, and the label
`millrace.subcommands` of the stage's image. Subcommands for a person's own machine alone are left out, such as the
tokenizer's `pin`, which rewrites recipe files. `tests/contract/test_one_off.py` compares it with the stages' apps.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.errors import RecipeError

if TYPE_CHECKING:
    from services.common.recipe.schema import Stage

ARTIFACTS = "artifacts"
"""The subcommand of every stage that verifies, shows, lists and cleans up artifacts: `services.common.artifacts`."""
ONE_OFF = "one-off"
"""The first word of a command that runs a subcommand in a container of its own."""
ON_BATCH = "batch"
"""The first word of a command that runs a stage on a node of an AWS Batch job: `services.common.launch.batch.job`."""
LABEL = "millrace.subcommands"
"""The label of an image with the names of its stage's subcommands, separated by blanks."""


@dataclass(frozen=True)
class Subcommand:
    """A subcommand of a stage."""

    name: str
    takes_recipe: bool = True
    """Whether the subcommand has the options `--recipe` and `--root` of the stage's own command."""
    takes_root: bool = False
    """Whether a subcommand without a recipe has the option `--root`."""
    may_name_run: bool = False
    """Whether the option `--run NAME` takes the place of the recipe."""

    def reads_recipe(self, words: Sequence[str]) -> bool:
        """Tell whether the subcommand reads a recipe when these words follow it."""
        return self.takes_recipe and not (self.may_name_run and any(word.split("=")[0] == "--run" for word in words))


_OF_EVERY_STAGE = (Subcommand(ARTIFACTS, takes_recipe=False),)
SUBCOMMANDS: dict[Stage, tuple[Subcommand, ...]] = {
    "tokenizer": (
        Subcommand("train-vocab", takes_recipe=False),
        *_OF_EVERY_STAGE,
    ),
    "compiler": (Subcommand("plan"), *_OF_EVERY_STAGE),
    "trainer": (
        Subcommand("plan"),
        Subcommand("doctor"),
        Subcommand("summary"),
        Subcommand("report", may_name_run=True),
        Subcommand("sample"),
        Subcommand("evaluate"),
        Subcommand("export"),
        Subcommand("import"),
        Subcommand("inspect-checkpoint"),
        Subcommand("runs", takes_recipe=False, takes_root=True),
        Subcommand("compare", takes_recipe=False, takes_root=True),
        *_OF_EVERY_STAGE,
    ),
}


def find_subcommand(stage: Stage, name: str) -> Subcommand:
    """Return a subcommand of this version of the stage. Raises `RecipeError` for an unknown name."""
    require_subcommand(stage, name, names_of(stage))
    return next(each for each in SUBCOMMANDS[stage] if each.name == name)


def names_of(stage: Stage) -> list[str]:
    return [each.name for each in SUBCOMMANDS[stage]]


def require_subcommand(stage: str, word: str, known: Sequence[str]) -> None:
    """Raise `RecipeError`, which lists the known subcommands, for a word that is not one of them."""
    if word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    meant = f" Do you mean {near[0]}?" if near else ""
    raise RecipeError(
        f"{word[:60]!r} is no subcommand of the {stage}, which has {', '.join(known)}.{meant} The stage itself runs "
        f"on nodes of its own: make deploy-stage STAGE={stage}"
    )
