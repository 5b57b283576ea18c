"""Lists the committed steps of a run, by names alone: no checkpoint is opened, and torch is not imported."""

from __future__ import annotations

from pathlib import Path

from services.common.artifacts.checkpoint import step_of
from services.common.artifacts.store import published_ids


def checkpoint_steps(collection: Path) -> list[int]:
    """Return the steps of the published checkpoints, ascending, without folders that a person has renamed."""
    return sorted(step for name in published_ids(collection) if (step := step_of(name)) is not None)


def newest_step(collection: Path) -> int | None:
    """Return the newest committed step without verifying its checkpoint; None if there is none."""
    return max(checkpoint_steps(collection), default=None)
