"""Knows the termination notice: the seconds between a stop signal and the kill of a node or container."""

from __future__ import annotations

import math
import os

NOTICE_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Variable with the seconds that Ray gives to a node which has to leave. Every stage's container sets it."""
TRAINER_NOTICE_SECONDS = 300
"""Notice in seconds of a trainer's container on every target, unless a deployment or the machines set another."""
CHECKPOINTS_PER_NOTICE = 3
"""Checkpoint times that a notice should hold: a stop waits for its step and for a checkpoint that is being written."""


def needed_notice_seconds(checkpoint_seconds: float) -> int:
    """Return the seconds of notice in which a checkpoint that takes this long is always committed."""
    return math.ceil(CHECKPOINTS_PER_NOTICE * checkpoint_seconds)


def explain_short_notice(checkpoint_seconds: float) -> str:
    """Return why the notice of this container may be too short for a checkpoint that takes this long, or nothing."""
    notice_seconds = float(os.environ.get(NOTICE_VARIABLE) or "inf")
    needed = needed_notice_seconds(checkpoint_seconds)
    if needed <= notice_seconds:
        return ""
    return (
        f"a checkpoint took {checkpoint_seconds:.1f} s, and this container has a termination notice of "
        f"{notice_seconds:g} s, which should be {CHECKPOINTS_PER_NOTICE} times as long: a stop may lose the steps "
        f"since the checkpoint before. On Kubernetes the next deployment sets {needed} s by itself; on AWS "
        f"Batch, raise checkpoint_gb in the tfvars of infra/stacks/batch, then make infra-up STACK=batch"
    )
