"""Failures in virtual time leave the goodput that the plan computes, and end a command that makes no progress."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.trainer.failure_simulation import SimulatedRun, simulate
from images.platforms import REPOSITORY
from services.common.recipe.file import load_recipe
from services.trainer.inspection.goodput import NODE_MTBF_HOURS, goodput
from services.trainer.inspection.run_plan import Assumptions, run_times

RECIPE = REPOSITORY / "recipes/llama2-7b-trn1.toml"


def run_of(num_nodes: int) -> SimulatedRun:
    recipe = load_recipe(RECIPE)
    return SimulatedRun.of_recipe(recipe, num_nodes, run_times(recipe, Assumptions()), NODE_MTBF_HOURS)


@pytest.mark.parametrize("num_nodes", [16, 1_024])
def test_the_simulated_goodput_is_that_of_the_plan(num_nodes: int) -> None:
    run = run_of(num_nodes)
    planned = goodput(run.costs, num_nodes, NODE_MTBF_HOURS)

    outcome = simulate(run, num_failures=5_000, seed=7)

    lost, expected = 1 - outcome.goodput(run), 1 - planned
    assert lost == pytest.approx(expected, rel=0.1), "seed 7"
    assert sum(outcome.failures.values()) == 5_000
    assert outcome.commands < 50


def test_a_command_whose_failures_leave_no_time_for_a_checkpoint_ends_after_its_restarts() -> None:
    run = replace(run_of(16), mtbf_seconds=60.0, max_restarts=3)

    outcome = simulate(run, num_failures=400, seed=7)

    assert outcome.committed_step == 0
    assert outcome.commands == 1 + 400 // 4  # each command has its first start and three restarts


def test_the_steps_since_the_newest_committed_checkpoint_are_lost() -> None:
    run = replace(run_of(16), mtbf_seconds=1e5, write_seconds=run_of(16).step_seconds * 10)

    outcome = simulate(run, num_failures=2_000, seed=7)

    mean_lost = outcome.lost_steps / 2_000
    assert mean_lost == pytest.approx(run.interval_steps / 2 + 10, rel=0.1), "seed 7"
    assert outcome.committed_step % run.interval_steps == 0
