"""How long before the end of its node or container a program hears of it."""

from __future__ import annotations

import math
import os

NOTICE_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Seconds that Ray gives to a node which is told to leave. Every stage's container has it; a laptop has none."""
TRAINER_NOTICE_SECONDS = 300
"""Notice that a container of the trainer gets on every target, unless a deployment or the machines say another."""
CHECKPOINTS_PER_NOTICE = 3
"""A stop comes within a step, and may come while another checkpoint is being written."""


def needed_notice_seconds(checkpoint_seconds: float) -> int:
    """Seconds of notice in which a checkpoint that takes so long is committed for sure."""
    return math.ceil(CHECKPOINTS_PER_NOTICE * checkpoint_seconds)


def explain_short_notice(checkpoint_seconds: float) -> str:
    """Why a checkpoint that takes so long might not be committed between a notice and the end; empty where it will."""
    notice_seconds = float(os.environ.get(NOTICE_VARIABLE) or "inf")
    needed = needed_notice_seconds(checkpoint_seconds)
    if needed <= notice_seconds:
        return ""
    return (
        f"a checkpoint took {checkpoint_seconds:.1f} s, and a container gets notice of {notice_seconds:g} s, which "
        f"should be {CHECKPOINTS_PER_NOTICE} times as much: a stop may lose the steps since the checkpoint before. On "
        f"Kubernetes the next deployment asks for {needed} s by itself; on AWS Batch the machines decide: raise "
        f"checkpoint_gb in the tfvars of infra/stacks/batch, then make infra-up STACK=batch"
    )
