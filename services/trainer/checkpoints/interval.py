"""How often to save: what a checkpoint costs against what a failure loses."""

from __future__ import annotations

import math

SECONDS_PER_HOUR = 3600.0
NODE_MTBF_HOURS = 54 * 24 * (16_384 / 8) / 419
"""Mean time between failures of one node, 6,335 h: Llama 3's pre-training was interrupted 419 times unexpectedly, in 54
days on 16,384 GPUs, 8 a node (arXiv 2407.21783, section 3.3.4). Nothing like it is published for Trainium."""


def mtbf_seconds(num_nodes: int, node_mtbf_hours: float = NODE_MTBF_HOURS) -> float:
    """Mean time between failures of any of the nodes."""
    return node_mtbf_hours * SECONDS_PER_HOUR / num_nodes


def optimal_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Young's first-order optimum of the time between checkpoints that cost `cost_seconds` each (Young 1974; Daly
    2006)."""
    return math.sqrt(2.0 * cost_seconds * mtbf_seconds)


def optimal_interval_steps(cost_seconds: float, step_seconds: float, num_nodes: int, node_mtbf_hours: float) -> int:
    """The same in steps, at least one."""
    seconds = optimal_interval_seconds(cost_seconds, mtbf_seconds(num_nodes, node_mtbf_hours))
    return max(1, round(seconds / step_seconds))
