"""Workers agree on their steps: all get the same numbers, in one message of a fixed size and at a fixed cost."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.process.shutdown import StopReason
from services.common.program.process_group import ProcessGroup
from services.common.testing.seeds import draw_seed
from services.trainer.agreement import AgreedStep, StepAgreement, WorkerStep
from services.trainer.health.loss_spikes import Deviation
from services.trainer.metrics.metric_table import WorkerNumbers
from services.trainer.tests import work

WORKERS = 3


def step(seconds: float = 1.0, **facts: object) -> WorkerStep:
    numbers = WorkerNumbers(seconds, 2 * seconds, 0.5, seconds, 0, 1e6, math.nan)
    return WorkerStep(StopReason.NONE, written_step=6, compared_seconds=seconds, numbers=numbers)._replace(
        **facts  # type: ignore[arg-type]
    )


def agree(*steps: WorkerStep) -> AgreedStep:
    encoded = [each.encode(rank) for rank, each in enumerate(steps)]
    return AgreedStep.decode([max(column) for column in zip(*encoded, strict=True)])


def test_a_step_is_reduced_to_what_the_workers_decide_by() -> None:
    steps = [step(2.0), step(4.0, deviation=Deviation.LOSS), step(3.0, stop_reason=StopReason.SIGTERM)]
    agreed = agree(*steps, step(3.5, written_step=0))

    assert (agreed.stop_reason, agreed.deviation) == (StopReason.SIGTERM, Deviation.LOSS)
    assert (agreed.written_step, agree(*steps).written_step) == (0, 6)
    assert (agreed.is_applied_by_some, agreed.is_skipped_by_some) == (True, False)
    assert (agreed.slowest_rank, agreed.slowest_seconds, agreed.fastest_seconds) == (1, 4.0, 2.0)
    assert agreed.numbers.fields["step_seconds"] == 8.0
    assert agreed.numbers.fields["gradient_seconds_spread"] == 2.0


@pytest.mark.parametrize("rank", [0, 7, 2**22 - 1])
def test_the_slowest_worker_is_named_and_of_equals_the_first(rank: int) -> None:
    slow, fast = step(86_400.0).encode(rank), step(10.0).encode(min(rank, 6))
    assert AgreedStep.decode([max(pair) for pair in zip(slow, fast, strict=True)]).slowest_rank == rank
    assert agree(step(1.0), step(5.0), step(5.0)).slowest_rank == 1


def test_a_single_worker_agrees_with_itself() -> None:
    assert not any(map(math.isnan, WorkerStep(StopReason.NONE, 0).encode(0)))  # gloo's maximum passes over NaN
    agreement = StepAgreement(ProcessGroup(0, 1))
    agreement.start(WorkerStep(StopReason.TIME_LIMIT, 0))
    assert agreement.finish().stop_reason is StopReason.TIME_LIMIT


def test_all_workers_stop_after_the_same_step_wherever_the_reason_was_heard(tmp_path: Path) -> None:
    seed = draw_seed()
    hears, at = random.Random(seed).randrange(WORKERS), random.Random(seed).randrange(work.AGREED_STEPS)
    run_workers(inline, work.agree_in_turns, (tmp_path, hears, at), WorkerGroupSpec(WORKERS, 1, WORKERS, tmp_path))

    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    assert all(each == found[0] for each in found)
    assert found[0]["stop reasons"].index(StopReason.SIGTERM) == at
    assert f"on rank {hears} " in found[0]["error"]  # the one whose last step had another outcome


def costs_of(num_workers: int, folder: Path) -> dict[str, float]:
    """Return the mean store bytes and descriptors of a worker."""
    folder.mkdir()
    spec = WorkerGroupSpec(num_workers, 1, num_workers, folder, preload=("torch", "services.trainer.tests.work"))
    run_workers(inline, work.count_group_costs, folder, spec)
    counted = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    assert len(counted) == num_workers
    return {name: sum(each[name] for each in counted) / num_workers for name in counted[0]}


@pytest.mark.parametrize(
    "sizes", [(8, 16), pytest.param((16, 32, 64), marks=pytest.mark.slow)], ids=["16 workers", "64 workers"]
)
def test_store_bytes_and_descriptors_of_a_worker_do_not_grow_with_the_workers(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    costs = [costs_of(size, tmp_path / str(size)) for size in sizes]

    for name in ("store bytes", "descriptors"):
        assert costs[-1][name] < 1.1 * costs[0][name], costs
