"""Estimates what failures cost a run: the goodput that they leave, and the best interval between checkpoints.

A failure costs the time until it is noticed, until the next start has ended a step, and until all steps since the
newest checkpoint are done again. Only reading the checkpoint grows with the nodes, and only without ZeRO; the rate of
failures always grows. `benchmarks.trainer.failure_simulation` compares the formula with a simulation.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from services.common.program.mesh import COLLECTIVE_TIMEOUT
from services.common.recipe.schema import Recipe
from services.trainer.health.watchdog import limit_seconds

SECONDS_PER_HOUR = 3600.0
NODE_MTBF_HOURS = 54 * 24 * (16_384 / 8) / 419
"""Mean time between failures of one node: 6,335 hours. Llama 3's pre-training had 419 unexpected interruptions in 54
days on 16,384 GPUs, 8 a node (arXiv 2407.21783, section 3.3.4). Nothing is published for Trainium.
"""
NODE_LOSS_SECONDS = 6.0
"""Seconds after which Ray's head takes a silent node for lost (`RAY_health_check_period_ms`)."""
NODE_WAIT_MINUTES = 10.0
"""Minutes until a lost node is replaced where no spare waits: EKS replaces a node with a failed accelerator after ten.
"""
FIRST_STEP_SECONDS, RESTART_SECONDS = 13.9, 1.4
"""Seconds from a command's start, and from a worker's kill, to the end of the first step under Ray, of a model that is
too small to add anything: medians of `python -m benchmarks.trainer.start_rows` (docs/benchmarks/trainer.md).
"""


class Failure(enum.StrEnum):
    WORKER = "lost worker"
    HANG = "hung worker"
    NODE = "lost node"


FAILURE_SHARES = {Failure.NODE: 0.78, Failure.HANG: 7 / 419, Failure.WORKER: 0.22 - 7 / 419}
"""Share of each kind in Llama 3's pre-training: 78 % faults of hardware, 7 of 419 time-outs of NCCL (arXiv 2407.21783,
section 3.3.4 and table 5).
"""


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a run's parts that decide the cost of a failure."""

    step_seconds: float
    write_seconds: float
    """Seconds in which all workers write a checkpoint, beside the training."""
    node_wait_seconds: float = 60 * NODE_WAIT_MINUTES


class FailureCost(NamedTuple):
    """Mean seconds for which one failure keeps all nodes from steps that count."""

    detection_seconds: float
    node_wait_seconds: float
    start_seconds: float
    read_seconds: float
    commit_seconds: float
    """Seconds in which what is left in memory becomes a checkpoint."""
    redone_seconds: float
    """Seconds of the steps since the newest checkpoint or copy."""

    @property
    def total_seconds(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        parts = (f"{_show_seconds(seconds)} {what}" for seconds, what in zip(self, PARTS, strict=True) if seconds)
        return f"{_show_seconds(self.total_seconds)} on average: {', '.join(parts)}"


PARTS = (
    "until it is noticed",
    "until there is another node (--node-wait-minutes)",
    "to start",
    "to read the checkpoint",
    "to commit the copy in memory before",
    "of recomputed steps",
)


def failure_costs(recipe: Recipe, num_nodes: int, times: RunTimes) -> dict[Failure, FailureCost]:
    """Return the mean cost of each kind of failure. Graphs load at once from a warm compile cache: no such load has
    been measured on Trainium.
    """
    train = recipe.train
    # With ZeRO each byte is read on one node, and without it on every node that has a model of its own.
    copies = 1 if recipe.parallel.zero_stage else min(num_nodes, recipe.parallel.data_parallel_size)
    read = copies * times.write_seconds
    # A checkpoint counts once it is committed. Until then a failure goes back to the one before.
    policy, write = recipe.checkpoint, times.write_seconds
    far = policy.interval_steps * times.step_seconds / 2 + write
    copied = policy.memory_interval_steps
    near = (write, copied * times.step_seconds / 2) if copied else (0.0, far)
    node = near if num_nodes > 1 else (0.0, far)  # of the only node's memory nothing is left
    limit = limit_seconds([times.step_seconds], train.watchdog_factor, train.watchdog_min_seconds)
    hang = COLLECTIVE_TIMEOUT.total_seconds() if limit is None else limit
    return {
        Failure.WORKER: FailureCost(0.0, 0.0, RESTART_SECONDS, read, *near),
        Failure.HANG: FailureCost(hang, 0.0, RESTART_SECONDS, read, *near),
        Failure.NODE: FailureCost(NODE_LOSS_SECONDS, times.node_wait_seconds, FIRST_STEP_SECONDS, read, *node),
    }


def mean_cost_seconds(costs: dict[Failure, FailureCost]) -> float:
    return sum(share * costs[failure].total_seconds for failure, share in FAILURE_SHARES.items())


def mtbf_seconds(num_nodes: int, node_mtbf_hours: float = NODE_MTBF_HOURS) -> float:
    """Return the mean time between failures of any of the nodes."""
    return node_mtbf_hours * SECONDS_PER_HOUR / num_nodes


def goodput(costs: dict[Failure, FailureCost], num_nodes: int, node_mtbf_hours: float) -> float:
    """Return the share of the nodes' time that goes into steps that count. The copy to the host, for which a checkpoint
    stops the training, is left out.
    """
    return 1 / (1 + mean_cost_seconds(costs) / mtbf_seconds(num_nodes, node_mtbf_hours))


def optimal_interval_steps(cost_seconds: float, step_seconds: float, num_nodes: int, node_mtbf_hours: float) -> int:
    """Return Young's first-order optimum of the steps between checkpoints, at least one (Young 1974; Daly 2006).

    `cost_seconds` is the time for which each checkpoint stops training.
    """
    seconds = math.sqrt(2.0 * cost_seconds * mtbf_seconds(num_nodes, node_mtbf_hours))
    return max(1, round(seconds / step_seconds))


def _show_seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 120 else f"{seconds / 60:,.1f} min"
