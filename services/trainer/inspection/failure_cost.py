"""Computes what a failure costs a run, and the share of the nodes' time that is left for steps that count.

A failure costs the time until it is noticed, until the next start of the workers has ended a step, and until all steps
since the newest checkpoint have been done again. Only the reading of the checkpoint grows with the number of nodes, and
only without ZeRO. The rate of failures grows with the number of nodes in all cases.
`benchmarks.trainer.failure_simulation` compares the formula with a simulation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.common.program.process_group import COLLECTIVE_TIMEOUT
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints.interval import mtbf_seconds
from services.trainer.health.watchdog import limit_seconds
from services.trainer.inspection.start_times import MEASURED_TIMES

LAUNCHER = "ray"
"""Launcher of a run with many nodes, whose measured times count."""
NODE_LOSS_SECONDS = 6.0
"""Seconds after which Ray's head takes a node for lost whose processes are gone: five checks, one in each second, as
every target sets them (`RAY_health_check_period_ms`).
"""
NODE_WAIT_MINUTES = 10.0
"""Minutes until another node has taken the place of a lost one, where no spare node waits: EKS replaces a node with a
failed accelerator after ten.
"""


class Failure(enum.StrEnum):
    """The kinds of failures that cost a run time."""

    WORKER = "lost worker"
    HANG = "hung worker"
    NODE = "lost node"


FAILURE_SHARES = {Failure.NODE: 0.78, Failure.HANG: 7 / 419, Failure.WORKER: 0.22 - 7 / 419}
"""Share that each kind has in all failures. 78 % of the interruptions of Llama 3's pre-training were faults of the
hardware, which a node is counted lost for, and 7 of 419 were time-outs of NCCL's watchdog (arXiv 2407.21783, section
3.3.4 and table 5).
"""


@dataclass(frozen=True)
class FailureCost:
    """Mean seconds for which one failure keeps all nodes from steps that count."""

    detection_seconds: float
    """Seconds from the failure to the end of all workers."""
    node_wait_seconds: float
    """Seconds in which no node takes the place of a lost one."""
    start_seconds: float
    """Seconds in which processes start, import and meet, as measured with a small model."""
    read_seconds: float
    """Seconds in which all workers read their parts of the checkpoint."""
    redone_seconds: float
    """Seconds of the steps since the newest checkpoint."""

    @property
    def downtime_seconds(self) -> float:
        """Seconds from the failure to the first new step."""
        return self.detection_seconds + self.node_wait_seconds + self.start_seconds + self.read_seconds

    @property
    def total_seconds(self) -> float:
        return self.downtime_seconds + self.redone_seconds


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a run's parts that decide the cost of a failure."""

    step_seconds: float
    write_seconds: float
    """Seconds in which all workers write a checkpoint, beside the training."""
    node_wait_seconds: float = 60 * NODE_WAIT_MINUTES


def failure_costs(recipe: Recipe, num_nodes: int, times: RunTimes) -> dict[Failure, FailureCost]:
    """Return the mean cost of each kind of failure.

    Graphs are taken as loaded at once from a warm compile cache: no such load has been measured on Trainium.
    """
    measured, train = MEASURED_TIMES[LAUNCHER], recipe.train
    read = _read_seconds(recipe, num_nodes, times)
    # A checkpoint counts once it is committed. Until then a failure goes back to the one before.
    redone = recipe.checkpoint.interval_steps * times.step_seconds / 2 + times.write_seconds
    limit = limit_seconds([times.step_seconds], train.watchdog_factor, train.watchdog_min_seconds)
    hang = COLLECTIVE_TIMEOUT.total_seconds() if limit is None else limit
    return {
        Failure.WORKER: FailureCost(0.0, 0.0, measured.restart_seconds, read, redone),
        Failure.HANG: FailureCost(hang, 0.0, measured.restart_seconds, read, redone),
        Failure.NODE: FailureCost(
            NODE_LOSS_SECONDS, times.node_wait_seconds, measured.first_step_seconds, read, redone
        ),
    }


def mean_cost_seconds(costs: dict[Failure, FailureCost]) -> float:
    """Return the mean cost of a failure, by the shares that the kinds of failures had in a known run."""
    return sum(share * costs[failure].total_seconds for failure, share in FAILURE_SHARES.items())


def goodput(costs: dict[Failure, FailureCost], num_nodes: int, node_mtbf_hours: float) -> float:
    """Return the share of the nodes' time that goes into steps that count, of failures that strike while it trains.

    Left out is the time for which a checkpoint stops the training, which is a copy to the host.
    """
    return 1 / (1 + mean_cost_seconds(costs) / mtbf_seconds(num_nodes, node_mtbf_hours))


def describe_cost(cost: FailureCost) -> str:
    parts = [
        (cost.detection_seconds, "until it is noticed"),
        (cost.node_wait_seconds, "until there is another node (--node-wait-minutes)"),
        (cost.start_seconds, "to start"),
        (cost.read_seconds, "to read the checkpoint"),
        (cost.redone_seconds, "of steps done again"),
    ]
    shown = ", ".join(f"{_describe_seconds(seconds)} {what}" for seconds, what in parts if seconds)
    return f"{_describe_seconds(cost.total_seconds)} on average: {shown}"


def _read_seconds(recipe: Recipe, num_nodes: int, times: RunTimes) -> float:
    """Return the seconds of a resume's reads, at the speed of writing: with ZeRO each byte is read on one node, and
    without it on every node with a model of its own.
    """
    copies = 1 if recipe.parallel.zero_stage else min(num_nodes, recipe.parallel.data_parallel_size)
    return copies * times.write_seconds


def _describe_seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 120 else f"{seconds / 60:,.1f} min"
