"""Failures in virtual time leave the goodput that the plan computes."""

from __future__ import annotations

import pytest

from benchmarks.trainer.failure_simulation import SimulatedRun, simulate
from images.platforms import REPOSITORY
from services.common.recipe.file import load_recipe
from services.trainer.inspection.goodput import NODE_MTBF_HOURS, goodput
from services.trainer.inspection.run_plan import Assumptions, run_times

RECIPE = REPOSITORY / "recipes/llama2-7b-trn1.toml"


@pytest.mark.parametrize("num_nodes", [16, 1_024])
def test_the_simulated_goodput_is_that_of_the_plan(num_nodes: int) -> None:
    recipe = load_recipe(RECIPE)
    run = SimulatedRun.of_recipe(recipe, num_nodes, run_times(recipe, Assumptions()), NODE_MTBF_HOURS)
    planned = goodput(run.costs, num_nodes, NODE_MTBF_HOURS)

    outcome = simulate(run, num_failures=5_000, seed=7)

    lost, expected = 1 - outcome.goodput(run), 1 - planned
    assert lost == pytest.approx(expected, rel=0.1), "seed 7"
    assert sum(outcome.failures.values()) == 5_000
    assert outcome.commands < 50
