"""Decides which checkpoints of a run stay, and removes the others.

Three kinds stay: the newest ones, those of `checkpoint.keep_interval_steps`, and with `train.loss_spike_sigma` those to
which a loss spike may take the run back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from services.common.artifacts.checkpoint import checkpoint_id
from services.common.artifacts.store import discard, discard_unfinished
from services.common.recipe.schema import Recipe
from services.common.recipe.training import Train
from services.trainer.checkpoints.steps import checkpoint_steps

logger = logging.getLogger(__name__)


def discard_old(collection: Path, recipe: Recipe, newest_step: int, looks_intact: Callable[[int], bool]) -> None:
    """Remove checkpoints that are older than the `keep_latest` newest intact ones, except those that stay for longer.

    `looks_intact` is asked for these and the damaged ones between them, which stay for a person to inspect. Checkpoints
    after `newest_step` are ignored: they are damaged, or the run would have continued from them. A failed removal is
    only logged.
    """
    policy = recipe.checkpoint
    steps = [step for step in reversed(checkpoint_steps(collection)) if step <= newest_step]
    kept = rollback_checkpoints(steps, recipe.train)
    if policy.keep_interval_steps:
        kept |= {step for step in steps if step % policy.keep_interval_steps == 0}
    intact = 0
    try:
        for step in steps:
            if intact < policy.keep_latest:
                intact += len(steps) > policy.keep_latest and looks_intact(step)
            elif step not in kept:
                discard(collection / checkpoint_id(step))
    except OSError as error:
        logger.warning("%s: an old checkpoint could not be removed: %s", collection, error)
    discard_left_over(collection)  # of a worker that was killed while it removed one


def discard_left_over(collection: Path) -> None:
    """Remove what killed attempts left of checkpoints. None may be in writing. A failed removal is only logged."""
    try:
        discard_unfinished(collection)
    except FileNotFoundError:  # the run has no checkpoint yet
        return
    except OSError as error:
        logger.warning("%s: the rest of a checkpoint could not be removed: %s", collection, error)


def discard_newer(collection: Path, step: int) -> None:
    """Remove the checkpoints of later steps, the newest first: after a kill the run goes back again from those left.

    Raises `OSError` if one cannot be removed: the run would continue from it.
    """
    for later in reversed(checkpoint_steps(collection)):
        if later > step:
            discard(collection / checkpoint_id(later))


def rollback_checkpoints(steps: Iterable[int], train: Train) -> set[int]:
    """Return the steps of the checkpoints to which a loss spike may take the run back from the newest of `steps`.

    These are the first checkpoint of each `loss_spike_rollback_steps` steps, from the newest that is old enough for the
    earliest spike which is not confirmed yet. Their number does not grow with the run.
    """
    firsts: dict[int, int] = {}
    for step in sorted(steps):
        firsts.setdefault(step // train.loss_spike_rollback_steps, step)
    if not train.loss_spike_sigma or not firsts:
        return set()
    furthest = max(steps) - _reach(train)
    oldest = max((first for first in firsts.values() if first <= furthest), default=0)
    return {first for first in firsts.values() if first >= oldest}


def most_checkpoints(recipe: Recipe) -> int:
    """Return the most checkpoints that exist at a time, with one in writing, without those that are kept for good."""
    train, policy = recipe.train, recipe.checkpoint
    stride = max(train.loss_spike_rollback_steps, policy.interval_steps)
    for_rollbacks = 2 + math.ceil(_reach(train) / stride) if train.loss_spike_sigma else 0
    return policy.keep_latest + for_rollbacks + 1


def _reach(train: Train) -> int:
    """Return the most steps between a checkpoint and the state to which a spike that it is part of goes back.

    Up to a patience of losses deviate there, after up to as many gradient norms (see `SpikeDetector.add`).
    """
    return train.loss_spike_rollback_steps + 2 * train.loss_spike_patience_steps
