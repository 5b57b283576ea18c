"""Checkpoints as a run finds them: the newest one that verifies, and what a worker takes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from services.common.artifacts.checkpoint import CheckpointManifest, checkpoint_id, step_of
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.files import Level, verify_files
from services.common.artifacts.store import Artifact, identity_key, open_artifact, published_ids, require_in_place
from services.common.errors import ArtifactError, LimitError, TryAgain, UnreadableError
from services.common.input.problem_list import list_problems, shorten
from services.common.program.llama import parameter_shapes
from services.common.recipe.derived import tokens_per_step
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.shards import ShardReader

logger = logging.getLogger(__name__)

Verify = Callable[[Artifact[CheckpointManifest]], None]
"""Raises `ArtifactError` for a checkpoint that is damaged."""


def verify_checkpoint(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Check the bytes of all files. Raises `ArtifactError` that names those that are damaged."""
    verify_files(checkpoint.path, checkpoint.manifest)


def verify_sizes(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Check that all files are there, whole: what one process can do for a checkpoint of any size."""
    verify_files(checkpoint.path, checkpoint.manifest, level="size")


def verify_state(recipe: Recipe, corpus: Artifact[CorpusManifest], level: Level = "full") -> Verify:
    """What checks all that can be checked of a checkpoint of the recipe's run: the files, by their bytes or sizes, that
    the manifest describes this run, that the shards hold each element of its model's state once and, at the level
    "full", that training leaves such values. That level reads each file twice, the second time from the kernel's cache.
    """

    def verify(checkpoint: Artifact[CheckpointManifest]) -> None:
        verify_files(checkpoint.path, checkpoint.manifest, level=level)
        require_of_run(checkpoint, recipe, corpus)
        reader = ShardReader(checkpoint, parameter_shapes(recipe.model))
        if level == "full":
            reader.require_values_of_training()

    return verify


def require_of_run(checkpoint: Artifact[CheckpointManifest], recipe: Recipe, corpus: Artifact[CorpusManifest]) -> None:
    """Raise `ArtifactError` unless a checkpoint's manifest says of its recipe, corpus and tokens what is true of the
    run that this recipe makes of this corpus.
    """
    manifest, state = checkpoint.manifest, checkpoint.manifest.checkpoint
    try:
        stored_key = identity_key(Recipe.model_validate(manifest.recipe), "checkpoint")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtifactError(
            f"{checkpoint.path}: its manifest has a recipe that this program does not read: {where}: {first['msg']}. "
            f"Restore the checkpoint from a copy, or use the version of Millrace that wrote it."
        ) from error
    key = identity_key(recipe, "checkpoint")
    facts = {
        "the identity of its recipe": (stored_key, key),
        "identity_key": (manifest.identity_key, key),
        "the digests of its inputs": (
            [link.content_digest for link in manifest.inputs],
            [corpus.manifest.content_digest],
        ),
        "tokens": (state.tokens, state.step * tokens_per_step(recipe)),
        "whether it has loss_spikes": (
            state.loss_spikes is not None,
            recipe.train.loss_spike_sigma > 0 and state.step > 0,
        ),
    }
    wrong = [
        f"{what}: {shorten(str(found), 1_000)}, expected {expected}"
        for what, (found, expected) in facts.items()
        if found != expected
    ]
    if wrong:
        raise ArtifactError(
            f"{checkpoint.path}: its manifest describes another run than {manifest.name}:\n  "
            + "\n  ".join(wrong)
            + "\nRestore the checkpoint from a copy, or move its folder away: the run then goes on from the one before."
        )


def newest_checkpoint(collection: Path, verify: Verify = verify_checkpoint) -> Artifact[CheckpointManifest] | None:
    """The newest checkpoint that verifies; damaged ones are reported and passed over.

    Raises `UnreadableError` for one that this user may not read: it may be intact. Raises `ArtifactError` when there
    are checkpoints and all of them are damaged: starting again from nothing would not be what the user meant.
    """
    damages = []
    for step in reversed(checkpoint_steps(collection)):
        try:
            return open_checkpoint(collection, step, verify)
        except UnreadableError:
            raise
        except ArtifactError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
            damages.append(f"{checkpoint_id(step)}: {error}")
    if damages:
        raise all_damaged(collection, damages)
    return None


def all_damaged(collection: Path, damages: list[str]) -> ArtifactError:
    return ArtifactError(
        f"{collection}: all {len(damages)} checkpoints are damaged:\n  "
        + "\n  ".join(list_problems(damages, "damaged checkpoints"))
        + f"\n"
        f"Restore one from a copy, or move {collection} away to start this run from step 0."
    )


def no_checkpoint_yet(collection: Path) -> ArtifactError:
    return ArtifactError(f"{collection}: the run has no checkpoint yet. Continue it, or wait for one.")


def checkpoint_steps(collection: Path) -> list[int]:
    """Steps of the published checkpoints, ascending; not what a person has renamed."""
    return sorted(step for name in published_ids(collection) if (step := step_of(name)) is not None)


def open_checkpoint(collection: Path, step: int, verify: Verify = verify_checkpoint) -> Artifact[CheckpointManifest]:
    """Raises `ArtifactError` for one that is damaged, or that is not what its place says."""
    folder = collection / checkpoint_id(step)
    checkpoint = require_in_place(open_artifact(folder, CheckpointManifest))
    if checkpoint.manifest.checkpoint.step != step:
        raise ArtifactError(
            f"{folder}: its manifest says that it is the state after step {checkpoint.manifest.checkpoint.step:,}."
        )
    verify(checkpoint)
    return checkpoint


def is_intact(collection: Path, step: int, verify: Verify) -> bool:
    try:
        open_checkpoint(collection, step, verify)
    except (ArtifactError, LimitError, TryAgain, OSError):  # also what cannot be read at this moment
        return False
    return True


def newest_step(collection: Path) -> int | None:
    """Of the committed checkpoints, without a look at whether they verify."""
    return max(checkpoint_steps(collection), default=None)
