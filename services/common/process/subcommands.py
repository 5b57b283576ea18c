"""The subcommands of the stages: what a stage's program does besides the stage itself.

`python -m services.<stage> <subcommand> ...`. Of these a cluster runs one in a short Job (`make stage-run`), whose
client reads them here and in the label `millrace.subcommands` of the stage's image. What only makes sense on a person's
own machine is left out: the tokenizer's `pin` writes into recipe files.
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
"""The subcommand of every stage that looks at artifacts, whoever made them: `services.common.artifacts`."""
ONE_OFF = "one-off"
"""The first word of a command that runs a subcommand in a container of its own: `services.common.launch.one_off`."""
LABEL = "millrace.subcommands"
"""The label of an image that has the names of its stage's subcommands, separated by blanks."""


@dataclass(frozen=True)
class Subcommand:
    """One subcommand of a stage."""

    name: str
    takes_recipe: bool = True
    """Does it take `--recipe` and `--root`, as the stage's own command does?"""


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
        Subcommand("report"),
        Subcommand("sample"),
        Subcommand("export"),
        Subcommand("import"),
        Subcommand("inspect-checkpoint"),
        *_OF_EVERY_STAGE,
    ),
}


def find_subcommand(stage: Stage, name: str) -> Subcommand:
    """The subcommand of this version of the stage. Raises `RecipeError` for a word that is none."""
    require_subcommand(stage, name, names_of(stage))
    return next(each for each in SUBCOMMANDS[stage] if each.name == name)


def names_of(stage: Stage) -> list[str]:
    return [each.name for each in SUBCOMMANDS[stage]]


def require_subcommand(stage: str, word: str, known: Sequence[str]) -> None:
    """Raise `RecipeError` for a word that is no subcommand, with those that are `known`."""
    if word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    meant = f" Do you mean {near[0]}?" if near else ""
    raise RecipeError(
        f"{word[:60]!r} is no subcommand of the {stage}, which has {', '.join(known)}.{meant} The stage itself runs on "
        f"nodes of its own: make deploy-stage STAGE={stage}"
    )
