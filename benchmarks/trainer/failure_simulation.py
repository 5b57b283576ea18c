"""Simulates a run over many failures in virtual time, for several numbers of nodes.

    python -m benchmarks.trainer.failure_simulation [--recipe FILE] [--nodes 16 64 256 1024] [--failures 2000]

Failures come by a Poisson process with the mean time between failures of a node, also while workers start. What a
failure costs comes from the plan's measured times and assumptions. The command's own decision says whether lost workers
are started again or the command ends, which a new command then continues. Each row has beside the simulated goodput the
one that `python -m services.trainer plan --nodes` computes. Each node has as much to do as in the recipe. The last two
columns are of the reduction by which all nodes agree on a step: its time, where a message takes 50 us, and the messages
that a node sends.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe
from services.trainer.inspection.goodput import (
    FAILURE_SHARES,
    FIRST_STEP_SECONDS,
    NODE_MTBF_HOURS,
    SECONDS_PER_HOUR,
    Failure,
    FailureCost,
    RunTimes,
    failure_costs,
    goodput,
    mtbf_seconds,
)
from services.trainer.inspection.run_plan import Assumptions, run_times
from services.trainer.supervision.restarts import RestartBudget

NODES = (16, 64, 256, 1_024)
RECIPE = Path("recipes/llama2-7b-trn1.toml")
NUM_FAILURES = 2_000
COLUMNS = ("nodes", "failure every", "goodput, simulated", "plan", "lost by a failure", "commands ended")


@dataclass(frozen=True)
class SimulatedRun:
    """A run whose steps, checkpoints and failures take virtual time."""

    num_nodes: int
    step_seconds: float
    interval_steps: int
    """Steps between two checkpoints."""
    write_seconds: float
    """Seconds from the begin of a checkpoint to its commit."""
    max_restarts: int
    costs: dict[Failure, FailureCost]
    mtbf_seconds: float
    """Mean seconds between two failures of any of the nodes."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, num_nodes: int, times: RunTimes, node_mtbf_hours: float) -> SimulatedRun:
        return cls(
            num_nodes=num_nodes,
            step_seconds=times.step_seconds,
            interval_steps=recipe.checkpoint.interval_steps,
            write_seconds=times.write_seconds,
            max_restarts=recipe.train.max_restarts,
            costs=failure_costs(recipe, num_nodes, times),
            mtbf_seconds=mtbf_seconds(num_nodes, node_mtbf_hours),
        )


@dataclass
class Outcome:
    """Counts of a simulated run."""

    seconds: float = 0.0
    committed_step: int = 0
    """Step of the newest checkpoint: the steps that count."""
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))
    commands: int = 1
    """Commands that the run took: all but the first one follow a command that had no restart left."""
    lost_steps: int = 0
    """Steps that were done and had to be done again."""

    def goodput(self, run: SimulatedRun) -> float:
        return self.committed_step * run.step_seconds / self.seconds


def simulate(run: SimulatedRun, num_failures: int, seed: int) -> Outcome:
    """Train until the run has met `num_failures` failures. The time of the simulation grows with the failures alone."""
    source, outcome = random.Random(seed), Outcome()  # nosec B311 # a simulation, not a secret
    budget, trains_at = RestartBudget(run.max_restarts, 0), 0.0
    for failed_at, failure in _failures(run, num_failures, source):
        outcome.seconds = failed_at
        outcome.failures[failure] += 1
        steps = max(0, int((failed_at - trains_at) / run.step_seconds))
        committed = _committed_step(run, outcome.committed_step, failed_at - trains_at)
        outcome.lost_steps += outcome.committed_step + steps - committed
        outcome.committed_step = committed
        cost = run.costs[failure]
        trains_at = failed_at + cost.total_seconds - cost.redone_seconds
        if budget.take(committed):
            continue
        outcome.commands += 1
        budget = RestartBudget(run.max_restarts, committed)
        trains_at += FIRST_STEP_SECONDS - cost.start_seconds
    return outcome


def _failures(run: SimulatedRun, num_failures: int, source: random.Random) -> Iterator[tuple[float, Failure]]:
    now, kinds = 0.0, list(FAILURE_SHARES)
    for _ in range(num_failures):
        now += source.expovariate(1 / run.mtbf_seconds)
        yield now, source.choices(kinds, [FAILURE_SHARES[kind] for kind in kinds])[0]


def _committed_step(run: SimulatedRun, begin: int, seconds: float) -> int:
    """Return the step of the newest checkpoint after `seconds` of training that began after the checkpoint `begin`.

    One checkpoint is written at a time: the next one begins when the training reaches its step and the one before is
    committed.
    """
    period = max(run.interval_steps * run.step_seconds, run.write_seconds)
    first = run.interval_steps * run.step_seconds + run.write_seconds
    if seconds < first:
        return begin
    return begin + run.interval_steps * (1 + int((seconds - first) / period))


def make_table(recipe: Recipe, nodes: list[int], times: RunTimes, num_failures: int, seed: int) -> str:
    """Simulate a run for each number of nodes, and format one row for each."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for num_nodes in nodes:
        run = SimulatedRun.of_recipe(recipe, num_nodes, times, NODE_MTBF_HOURS)
        outcome = simulate(run, num_failures, seed)
        simulated, planned = outcome.goodput(run), goodput(run.costs, num_nodes, NODE_MTBF_HOURS)
        lost_minutes = (1 - simulated) * outcome.seconds / num_failures / 60
        lines.append(
            f"| {num_nodes:,} | {run.mtbf_seconds / SECONDS_PER_HOUR:,.1f} h | {simulated:.2%} | {planned:.2%} | "
            f"{lost_minutes:,.1f} min | {outcome.commands - 1} of {num_failures:,} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer.failure_simulation")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help=f"recipe with an instance type (default: {RECIPE})")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="numbers of nodes")
    parser.add_argument("--failures", type=int, default=NUM_FAILURES, help=f"failures (default: {NUM_FAILURES:,})")
    parser.add_argument("--seed", type=int, default=1, help="seed of the failures (default: 1)")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    times = run_times(recipe, Assumptions())
    print(f"{arguments.recipe}, {times.step_seconds:.1f} s a step, seed {arguments.seed}\n")
    print(make_table(recipe, [*arguments.nodes], times, arguments.failures, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
