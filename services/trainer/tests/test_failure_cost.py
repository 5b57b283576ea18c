"""`plan` says what a failure costs a run, and which goodput that leaves for a number of nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.common.recipe.file import load_recipe
from services.trainer.__main__ import main
from services.trainer.checkpoints.interval import NODE_MTBF_HOURS
from services.trainer.inspection.failure_cost import (
    FAILURE_SHARES,
    Failure,
    RunTimes,
    failure_costs,
    goodput,
    mean_cost_seconds,
)
from services.trainer.inspection.start_times import MEASURED_TIMES

LLAMA_2_7B = Path(__file__).resolve().parents[3] / "recipes" / "llama2-7b-trn1.toml"
TIMES = RunTimes(step_seconds=40.0, write_seconds=69.0, node_wait_seconds=600.0)


def plan(*options: str) -> int:
    return exit_code_of(
        lambda: main(["plan", "--recipe", str(LLAMA_2_7B), "--root", "/nonexistent", "--no-dry-run", *options])
    )


def planned_goodputs(shown: str) -> dict[str, float]:
    return {nodes: float(share) for nodes, share in re.findall(r"goodput, ([\d,]+) nodes? +([\d.]+)%", shown)}


def test_the_plan_says_what_a_failure_costs_and_the_goodput_of_more_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--nodes", "64", "1024") == 0

    shown = capsys.readouterr().out
    found = planned_goodputs(shown)
    assert [*found] == ["4", "64", "1,024"]
    assert found["4"] > found["64"] > found["1,024"] > 90
    for failure in Failure:
        assert re.search(rf"{failure} +[\d.]+ min on average: ", shown)


def test_another_node_that_comes_at_once_and_nodes_that_live_longer_raise_the_goodput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []
    for options in ((), ("--node-wait-minutes=1",), ("--node-wait-minutes=1", "--node-mtbf-hours=20000")):
        assert plan("--nodes", "1024", *options) == 0
        found.append(planned_goodputs(capsys.readouterr().out)["1,024"])

    assert found[0] < found[1] < found[2]


@pytest.mark.parametrize("options", [("--nodes", "0"), ("--node-wait-minutes=0",)])
def test_a_number_that_no_cluster_has_ends_with_2(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*options) == 2
    assert options[0].partition("=")[0] in capsys.readouterr().err


def test_a_lost_worker_costs_less_than_a_hung_one_and_a_lost_node() -> None:
    costs = failure_costs(load_recipe(LLAMA_2_7B), 4, TIMES)
    redone_seconds = 50 * 40.0 / 2 + 69.0

    worker, hang, node = costs[Failure.WORKER], costs[Failure.HANG], costs[Failure.NODE]
    assert worker.total_seconds == pytest.approx(MEASURED_TIMES["ray"].restart_seconds + 69.0 + redone_seconds)
    assert hang.total_seconds - worker.total_seconds == pytest.approx(10 * 40.0)  # ten steps
    assert node.total_seconds - worker.total_seconds > 600
    assert sum(FAILURE_SHARES.values()) == pytest.approx(1)
    assert worker.total_seconds < mean_cost_seconds(costs) < node.total_seconds


def test_a_run_without_a_watchdog_waits_for_the_timeout_of_collectives() -> None:
    recipe = load_recipe(LLAMA_2_7B, {"train.watchdog_factor": "0"})
    assert failure_costs(recipe, 4, TIMES)[Failure.HANG].detection_seconds == 600


def test_reading_a_checkpoint_grows_with_the_nodes_without_zero_alone() -> None:
    for zero_stage, expected in (("1", 69.0), ("0", 16 * 69.0)):
        recipe = load_recipe(LLAMA_2_7B, {"parallel.zero_stage": zero_stage})
        assert failure_costs(recipe, 1_024, TIMES)[Failure.WORKER].read_seconds == expected


def test_goodput_is_the_share_of_a_failures_period_that_the_failure_leaves() -> None:
    costs = failure_costs(load_recipe(LLAMA_2_7B), 64, TIMES)
    period = NODE_MTBF_HOURS * 3600 / 64

    assert goodput(costs, 64, NODE_MTBF_HOURS) == pytest.approx(period / (period + mean_cost_seconds(costs)))
