"""A step of many workers as a fixed number of numbers: the same however the workers are spread over nodes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import reduce

import pytest

from services.common.errors import WorkersLost
from services.common.launch.node_board import MAX_NUMBERS
from services.common.process.stop_reason import StopReason
from services.common.testing.seeds import draw_seed
from services.trainer.agreement.step_reduction import (
    NAMED_RANKS,
    ReducedStep,
    WorkerStep,
    join_encoded,
    require_same_outcome,
)
from services.trainer.health.loss_spikes import Deviation
from services.trainer.metrics.metric_table import WorkerNumbers


def step(seconds: float = 1.0, **facts: object) -> WorkerStep:
    numbers = WorkerNumbers(seconds, 2 * seconds, 0.5, seconds, 0, 1e6, math.nan, 1e9)
    return WorkerStep(StopReason.NONE, written_step=6, compared_seconds=seconds, numbers=numbers)._replace(
        **facts  # type: ignore[arg-type]
    )


def test_a_step_is_reduced_to_what_the_workers_decide_by() -> None:
    steps = [step(2.0), step(4.0, deviation=Deviation.LOSS), step(3.0, stop_reason=StopReason.SIGTERM)]
    reduced = ReducedStep.of_node(0, [*steps, step(3.5, written_step=0)])

    assert reduced.stop_reason is StopReason.SIGTERM
    assert reduced.deviation is Deviation.LOSS
    assert reduced.written_step == 0
    assert ReducedStep.of_node(0, steps).written_step == 6
    assert (reduced.slowest_rank, reduced.slowest_seconds, reduced.median_seconds) == (1, 4.0, 3.0)
    assert reduced.numbers.fields["step_seconds"] == 8.0
    assert reduced.numbers.fields["gradient_seconds_spread"] == 2.0
    assert reduced.numbers.gemm_flops_per_second == 4e9


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [4, 4, 4], [5, 1, 6]])
def test_the_nodes_of_the_workers_change_nothing_but_the_median(sizes: list[int]) -> None:
    numbers = random.Random(draw_seed())
    steps = [step(numbers.random(), is_applied=numbers.random() < 0.5) for _ in range(12)]
    nodes, first = list[Sequence[float]](), 0
    for size in sizes:
        nodes.append(ReducedStep.of_node(first, steps[first : first + size]).encode())
        first += size
    reduced = ReducedStep.decode(reduce(join_encoded, nodes))

    assert len(reduced.encode()) == len(nodes[0]) <= MAX_NUMBERS
    expected = ReducedStep.of_node(0, steps)
    assert repr(reduced._replace(median_seconds=0)) == repr(expected._replace(median_seconds=0))  # NaN is not itself


def test_a_node_that_is_slow_as_a_whole_does_not_hide_its_slowness() -> None:
    nodes = [ReducedStep.of_node(8 * node, [step(30.0 if node == 1 else 10.0)] * 8) for node in range(2)]
    reduced = nodes[0].joined(nodes[1])

    assert (reduced.slowest_rank, reduced.slowest_seconds, reduced.median_seconds) == (8, 30.0, 10.0)


@pytest.mark.parametrize(
    ("skipped", "applied", "message"),
    [
        ([3], 3, "step 7 was skipped on rank 3 only"),
        ([0, 2, 3], 1, "step 7 was applied on rank 1 only"),
        (range(40, 60), 80, "step 7 was skipped on rank 40, 41, 42, 43, 44, 45, 46, 47 and 12 more ranks only"),
    ],
)
def test_workers_with_another_outcome_than_most_are_named(skipped: list[int], applied: int, message: str) -> None:
    count = len(skipped) + applied
    steps = [ReducedStep.of_worker(rank, step(is_applied=rank not in skipped)) for rank in range(count)]
    encoded: list[Sequence[float]] = [each.encode() for each in steps]
    reduced = ReducedStep.decode(reduce(join_encoded, encoded))

    with pytest.raises(WorkersLost, match=message):
        require_same_outcome(reduced, 7)
    assert len(reduced.skipped.named) <= NAMED_RANKS
    for alike in (steps[skipped[0]], steps[skipped[-1] - 1]):
        require_same_outcome(alike, 7)


def test_a_step_comes_back_from_its_numbers() -> None:
    given = step(0.1, stop_reason=StopReason.PREEMPTION, deviation=Deviation.GRADIENT_NORM, is_applied=False)

    assert repr(WorkerStep.decode(given.encode())) == repr(given)
