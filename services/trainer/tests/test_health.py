"""Workers that freeze or compute wrongly, and losses that spike: what the run does, and what its record says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.common.artifacts.checkpoint import CheckpointManifest, LossSpikes
from services.common.artifacts.lease import hold_lease
from services.common.artifacts.store import open_artifact
from services.common.errors import RecipeError, WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec
from services.common.program.step import Program
from services.trainer.health.loss_spikes import SpikeDetector
from services.trainer.health.straggler import STEPS, Stragglers
from services.trainer.health.watchdog import limit_seconds, read_heartbeat, stacks_file
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.events import EVENTS_FILE, read_events
from services.trainer.metrics.records import read_metrics
from services.trainer.run import open_run, summarize
from services.trainer.supervise import supervise
from services.trainer.tests import work
from services.trainer.tests.runs import checkpoints, read_run, state_hash

ALONE = WorkerEnvironment(rank=0, world_size=1, launch="inline")
TWO = {"parallel__data_parallel_size": "2"}
SPIKY = {"train__loss_spike_sigma": "6", "train__loss_spike_window": "4"}


@pytest.fixture(scope="module")
def healthy(new_shared_job: Callable[..., Job]) -> Job:
    """A run to which nothing happens."""
    job = new_shared_job("healthy")
    train(job, ALONE)
    return job


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the workers as the command does."""

    def run(function: Callable[[Job, WorkerEnvironment], None], job: Job) -> None:
        monkeypatch.setattr("services.trainer.supervise.train_on_node", function)
        with hold_lease(tmp_path / "command.lock") as held:
            supervise(job, held)

    return run


def final_state(job: Job) -> str:
    return state_hash(checkpoints(job.root)["step-00000020"])


def kinds(job: Job) -> list[str]:
    return [event["event"] for event in read_events(job.run_folder)]


def test_a_frozen_worker_ends_in_stacks_and_75_and_the_same_command_continues(
    new_job: Callable[..., Job], command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO, train__watchdog_min_seconds="2", train__max_restarts="0")
    with pytest.raises(WorkersLost, match=r"rank 0: step 7 has taken (?s:.*)No heartbeat comes from rank 1") as raised:
        command(work.train_with_a_worker_that_freezes, job)

    assert raised.value.exit_code == 75
    assert list(checkpoints(job.root)) == ["step-00000005"]
    frozen = read_heartbeat(job.run_folder, 1)
    assert not psutil.pid_exists(frozen["pid"])
    stacks = stacks_file(job.run_folder, 0).read_text(encoding="utf-8")
    assert "train_step" in stacks
    [event] = read_events(job.run_folder)
    assert (event["event"], event["rank"], event["silent_ranks"], event["step"]) == ("watchdog", 0, [1], 7)

    command(work.train_with_a_worker_that_freezes, job)
    assert read_run(job.root).starts[-1].endswith("step-00000005")
    assert final_state(job) == final_state(healthy)
    assert "events        1 watchdog" in summarize(open_run(job.root, job.run))
    assert read_metrics(job.run_folder).lines[-1]["straggler_score"] >= 1


def test_a_worker_that_computes_wrongly_once_is_named_and_nothing_of_it_stays(
    new_job: Callable[..., Job], command: Callable[..., None], healthy: Job
) -> None:
    job = new_job(**TWO)
    command(work.train_with_a_worker_that_errs_once, job)

    found, restart = read_events(job.run_folder)
    assert (found["event"], found["cause"], found["step"], found["ranks"]) == ("nan", "hardware", 8, [1])
    assert (restart["event"], restart["from_step"]) == ("restart", 5)
    assert restart["cause"].startswith("rank 1 (")
    assert read_metrics(job.run_folder).lines[-1]["skipped_steps"] == 0
    assert final_state(job) == final_state(healthy)


def test_gradients_that_the_data_make_infinite_are_the_datas(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job()
    work.poison(monkeypatch, 3)
    train(job, ALONE)

    [event] = read_events(job.run_folder)
    assert (event["event"], event["cause"], event["step"], event["batch"], event["ranks"]) == ("nan", "data", 4, 3, [0])
    assert "events        1 nan (data)" in summarize(open_run(job.root, job.run))


def test_a_spike_is_rolled_back_past_its_batch_whoever_is_stopped_or_killed_when(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, stopped, killed = (new_job(root, **SPIKY) for root in ("straight", "stopped", "killed"))
    two = new_job("two", **SPIKY, **TWO)
    work.train_with_spikes(straight, ALONE)
    inline.run_workers(work.train_with_spikes, two, WorkerGroupSpec(2, 1, 2, two.run_folder))
    work.train_with_spikes(new_job("stopped", **SPIKY, train__max_steps="7"), ALONE)
    work.train_with_spikes(stopped, ALONE)
    with monkeypatch.context() as patch:
        kill_after_the_roll_back(patch)
        with pytest.raises(KeyboardInterrupt):
            work.train_with_spikes(killed, ALONE)
    work.train_with_spikes(killed, ALONE)

    spike, rollback = read_events(straight.run_folder)
    assert (spike["event"], spike["step"], spike["batch"]) == ("loss_spike", 9, 8)
    assert spike["loss"] > spike["limit"]
    assert (rollback["event"], rollback["step"], rollback["to_step"]) == ("rollback", 9, 5)
    assert read_events(stopped.run_folder)[1]["to_step"] == 7
    assert kinds(killed) == ["loss_spike", "rollback"] * 2
    newest = open_artifact(checkpoints(straight.root)["step-00000020"], CheckpointManifest).manifest.checkpoint
    assert newest.loss_spikes
    assert newest.loss_spikes.skipped_batches == (8,)
    losses = [record["loss"] for record in read_metrics(straight.run_folder).lines]
    assert list(newest.loss_spikes.recent_losses) == losses[-4:]
    assert len({final_state(job) for job in (straight, two, stopped, killed)}) == 1
    assert "events        1 loss_spike, 1 rollback" in summarize(open_run(straight.root, straight.run))


def kill_after_the_roll_back(patch: pytest.MonkeyPatch) -> None:
    train_step, steps = Program.train_step, []

    def end(program: Program, step: int, *arguments: Any) -> Any:
        steps.append(step)
        if steps.count(8) == 2:
            raise KeyboardInterrupt
        return train_step(program, step, *arguments)

    patch.setattr(Program, "train_step", end)


def test_a_spike_before_the_first_checkpoint_goes_back_to_the_begin(new_job: Callable[..., Job]) -> None:
    rare, often = new_job("rare", **SPIKY, checkpoint__interval_steps="20"), new_job("often", **SPIKY)
    for job in (rare, often):
        work.train_with_spikes(job, ALONE)

    assert read_events(rare.run_folder)[1]["to_step"] == 0
    assert final_state(rare) == final_state(often)


def test_a_loss_that_spikes_on_every_batch_ends_the_run_with_2(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(**SPIKY)
    work.spike(monkeypatch, *range(8, 40))
    with pytest.raises(RecipeError, match=r"at step 9: its loss is .* 3 batches right before it were left out"):
        train(job, ALONE)
    assert kinds(job) == ["loss_spike", "rollback"] * 3 + ["loss_spike"]
    assert list(checkpoints(job.root)) == ["step-00000005"]


def test_what_cannot_be_written_or_read_of_the_events_stops_no_run(new_job: Callable[..., Job]) -> None:
    job = new_job()
    (job.run_folder / EVENTS_FILE).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        work.poison(patch, 3)
        train(job, ALONE)
    shutil.rmtree(job.run_folder / EVENTS_FILE)
    (job.run_folder / EVENTS_FILE).write_bytes(b'{"event": 3}\n[]\n\xff\n{"event": "nan"}\n{"event": "res')
    assert "events        1 nan (None)" in summarize(open_run(job.root, job.run))


def test_batches_that_are_left_out_move_those_after_them(new_job: Callable[..., Job]) -> None:
    settings = new_job(**SPIKY).recipe.train
    detector = SpikeDetector(settings, LossSpikes(skipped_batches=(2, 3, 5), recent_losses=()))
    assert [detector.batch_of(step) for step in range(5)] == [0, 1, 4, 6, 7]
    assert detector.skip_batch(0)
    assert [detector.batch_of(step) for step in range(5)] == [1, 4, 6, 7, 8]


def test_losses_are_compared_once_the_window_is_full(new_job: Callable[..., Job]) -> None:
    settings = new_job(**SPIKY).recipe.train
    detector = SpikeDetector(settings, None)
    for loss in (1.0, 3.0, 1.0):
        detector.add(loss)
        assert detector.limit() == float("inf")
    detector.add(3.0)
    assert detector.limit() == 2 + 6 * 1
    off = SpikeDetector(settings.model_copy(update={"loss_spike_sigma": 0.0}), None)
    off.add(1.0)
    assert off.state is None


def test_a_steps_limit_follows_the_median() -> None:
    assert limit_seconds([1.0, 2.0, 90.0], 10, 5) == 20
    assert limit_seconds([1.0, 2.0, 90.0], 10, 60) == 60
    assert limit_seconds([1.0], 0, 60) is None
    assert limit_seconds([], 10, 60) is None


def test_the_straggler_is_the_worker_that_the_others_waited_for() -> None:
    stragglers = Stragglers()

    def exchange(*of_each_worker: float) -> list[int | None]:
        return [stragglers.add(of_each_worker) for _ in range(STEPS)]

    assert exchange(2, 2, 4, 2) == [None] * (STEPS - 1) + [2]
    assert stragglers.metrics == {"slowest_rank": 2, "straggler_score": 2.0}
    assert set(exchange(2, 2, 4, 2)) == {None}  # it was told
    assert set(exchange(0.02, 0.02, 0.02, 0.04)) == {None}  # nobody waited for long
    assert stragglers.metrics == {"slowest_rank": 3, "straggler_score": 2.0}
