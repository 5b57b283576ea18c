"""Checkpoints as a run finds them: the newest one that verifies, and what a worker takes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from services.common.artifacts.checkpoint import CheckpointManifest, checkpoint_id, step_of
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import Artifact, open_artifact, published_ids, require_in_place
from services.common.errors import ArtifactError, TryAgain, UnreadableError

logger = logging.getLogger(__name__)

Verify = Callable[[Artifact[CheckpointManifest]], None]
"""Raises `ArtifactError` for a checkpoint that is damaged."""


def verify_checkpoint(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Check the bytes of all files. Raises `ArtifactError` that names those that are damaged."""
    verify_files(checkpoint.path, checkpoint.manifest)


def verify_sizes(checkpoint: Artifact[CheckpointManifest]) -> None:
    """Check that all files are there, whole: what one process can do for a checkpoint of any size."""
    verify_files(checkpoint.path, checkpoint.manifest, level="size")


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
        f"{collection}: all {len(damages)} checkpoints are damaged:\n  " + "\n  ".join(damages) + f"\n"
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


def is_intact(collection: Path, step: int) -> bool:
    try:
        open_checkpoint(collection, step)
    except (ArtifactError, TryAgain, OSError):  # also what cannot be read at this moment
        return False
    return True


def newest_step(collection: Path) -> int | None:
    """Of the committed checkpoints, without a look at whether they verify."""
    return max(checkpoint_steps(collection), default=None)
