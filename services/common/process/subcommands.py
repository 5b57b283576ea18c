"""Lists the subcommands of the stages, `python -m services.<stage> <subcommand> ...`.

`make stage-run` runs one of them on a cluster in a short Job, and its client reads this list. Subcommands for a
person's own machine alone are left out, such as the tokenizer's `pin`, which rewrites recipe files.
`tests/contract/test_one_off.py` compares it with the stages' apps.
"""

from __future__ import annotations

import difflib
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


SUBCOMMANDS: dict[Stage, tuple[str, ...]] = {
    "tokenizer": ("train-vocab", ARTIFACTS),
    "compiler": (ARTIFACTS,),
    "trainer": (
        *("plan", "doctor", "summary", "report", "sample", "evaluate", "export", "import", "inspect-checkpoint"),
        *("runs", "compare", ARTIFACTS),
    ),
}
WITH_RECIPE = ("plan", "doctor", "import")
"""Subcommands with the option `--recipe` of the stage's own command. Others take no recipe, or a run that has one."""
WITHOUT_ROOT = ("train-vocab", ARTIFACTS)
"""Subcommands without its option `--root`."""


def require_subcommand(stage: Stage, word: str) -> None:
    """Raise `RecipeError`, which lists the stage's subcommands, for a word that is not one of them."""
    known = SUBCOMMANDS[stage]
    if word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    meant = f" Do you mean {near[0]}?" if near else ""
    raise RecipeError(
        f"{word[:60]!r} is not a subcommand of the {stage}, which has {', '.join(known)}.{meant} The stage itself runs "
        f"on nodes of its own: make deploy-stage STAGE={stage}"
    )
