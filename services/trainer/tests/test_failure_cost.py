"""`plan` estimates what a failure costs a run, the goodput that failures leave, and the best checkpoint interval."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.trainer.__main__ import main
from services.trainer.inspection.goodput import (
    FAILURE_SHARES,
    RESTART_SECONDS,
    Failure,
    RunTimes,
    failure_costs,
    mean_cost_seconds,
    optimal_interval_steps,
)

LLAMA_2_7B = Path(__file__).resolve().parents[3] / "recipes" / "llama2-7b-trn1.toml"
TIMES = RunTimes(step_seconds=40.0, write_seconds=69.0, node_wait_seconds=600.0)


def planned_goodput(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[float]:
    """Return the goodput in percent on the recipe's nodes, on 64 and on 1,024."""
    command = ["plan", "--recipe", str(LLAMA_2_7B), "--root", "/nonexistent", "--nodes=64", "--nodes=1024", *overrides]
    assert exit_code_of(lambda: main(command)) == 0
    return [float(each) for each in re.findall(r"goodput, [\d,]+ nodes? +([\d.]+)%", capsys.readouterr().out)]


def test_plan_prints_a_goodput_that_falls_with_nodes_and_without_a_watchdog(capsys: pytest.CaptureFixture[str]) -> None:
    few, more, many = planned_goodput(capsys)
    assert few > more > many > 90
    assert planned_goodput(capsys, "--train.watchdog_factor=0")[-1] < many  # hangs last until collectives time out


def test_a_lost_worker_costs_less_than_a_hung_one_and_a_lost_node() -> None:
    costs = failure_costs(load_recipe(LLAMA_2_7B), 4, TIMES)
    redone_seconds = 50 * 40.0 / 2 + 69.0

    worker, hang, node = costs[Failure.WORKER], costs[Failure.HANG], costs[Failure.NODE]
    assert worker.total_seconds == pytest.approx(RESTART_SECONDS + 69.0 + redone_seconds)
    assert hang.total_seconds - worker.total_seconds == pytest.approx(10 * 40.0)  # ten steps
    assert node.total_seconds - worker.total_seconds > 600
    assert sum(FAILURE_SHARES.values()) == pytest.approx(1)
    assert worker.total_seconds < mean_cost_seconds(costs) < node.total_seconds
    every_node_reads = failure_costs(load_recipe(LLAMA_2_7B, {"parallel.zero_stage": "0"}), 1_024, TIMES)
    assert every_node_reads[Failure.WORKER].read_seconds == 16 * 69.0  # a model of its own for each replica


def test_youngs_optimum_loses_least_time_to_checkpoints_and_failures() -> None:
    cost_seconds, mtbf_hours = 60.0, 24.0

    def lost_share(steps: int) -> float:  # first order: a checkpoint an interval, half an interval a failure
        return cost_seconds / steps + steps / (2 * 3600 * mtbf_hours)

    best = optimal_interval_steps(cost_seconds, 1.0, 1, mtbf_hours)
    assert lost_share(best) < min(lost_share(best - 30), lost_share(best + 30))
    assert best == round(math.sqrt(2 * cost_seconds * 3600 * mtbf_hours))
    assert optimal_interval_steps(cost_seconds, 1e9, 1, mtbf_hours) == 1
