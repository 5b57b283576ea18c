"""Computes the best interval between checkpoints from their cost and the rate of failures."""

from __future__ import annotations

import math

SECONDS_PER_HOUR = 3600.0
NODE_MTBF_HOURS = 54 * 24 * (16_384 / 8) / 419
"""Mean time between failures of one node in hours: 6,335. Llama 3's pre-training had 419 unexpected interruptions in 54
days on 16,384 GPUs, 8 in each node (arXiv 2407.21783, section 3.3.4). No such number is published for Trainium.
"""


def mtbf_seconds(num_nodes: int, node_mtbf_hours: float = NODE_MTBF_HOURS) -> float:
    """Return the mean time between failures of any of the nodes, in seconds."""
    return node_mtbf_hours * SECONDS_PER_HOUR / num_nodes


def optimal_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's first-order optimum of the seconds between checkpoints (Young 1974; Daly 2006).

    `cost_seconds` is the time for which each checkpoint stops training.
    """
    return math.sqrt(2.0 * cost_seconds * mtbf_seconds)


def optimal_interval_steps(cost_seconds: float, step_seconds: float, num_nodes: int, node_mtbf_hours: float) -> int:
    """Return `optimal_interval_seconds` in steps, at least one."""
    seconds = optimal_interval_seconds(cost_seconds, mtbf_seconds(num_nodes, node_mtbf_hours))
    return max(1, round(seconds / step_seconds))
