"""Losses that spike: which batches a run leaves out, where it goes back to, and what it leaves alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.common.artifacts.checkpoint import BatchRange, CheckpointManifest, LossSpikes
from services.common.artifacts.store import discard, open_artifact
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.trainer.checkpoints import retention
from services.trainer.data import micro_batches
from services.trainer.health.loss_spikes import SpikeDetector, Verdict, untrained_loss
from services.trainer.job import Job
from services.trainer.loop import Training
from services.trainer.metrics.events import EventTail, read_events, warnings_of
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.run import open_run
from services.trainer.runs.summary import summarize
from services.trainer.tests import work
from services.trainer.tests.builders import ALONE, NewJob, make_recipe, train_here, train_new
from services.trainer.tests.runs import checkpoints

Numbers = npt.NDArray[Any]
# The weights are ruined after step 12, so that the losses of steps 13 to 15 are high: see `work.RUINOUS_BATCH`.
FIRST_STEP, LAST_STEP, BEGIN = 13, 15, 8
SKIPPED = BatchRange(first=8, last=14)
WATCHED = {"train__loss_spike_sigma": "6"}


@pytest.fixture(scope="module")
def spared(new_shared_job: NewJob) -> Job:
    """A run that never reads the batches which a spike of batch 11 leaves out."""
    job = new_shared_job("spared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.trainer.loop.micro_batches", read_spared)
        train_here(job)
    return job


def read_spared(stream: Any, recipe: Any, number: int, mesh: Any, offset: int) -> Any:
    return micro_batches(stream, recipe, number + (number >= SKIPPED.first) * len(SKIPPED), mesh, offset)


def kinds(job: Job) -> list[str]:
    return [event["event"] for event in read_events(job.run_folder)]


def newest(job: Job) -> LossSpikes:
    path = list(checkpoints(job.root).values())[-1]
    return open_artifact(path, CheckpointManifest).manifest.checkpoint.loss_spikes


def test_the_batches_before_and_during_a_spike_are_skipped_and_the_run_ends_as_without_them(
    new_job: NewJob, spared: Job
) -> None:
    job = new_job(**work.SPIKY)
    work.train_with_a_ruinous_batch(job, ALONE)

    spike, rollback = read_events(job.run_folder)
    found = [spike[name] for name in ("event", "first_step", "step")]
    assert (found, spike["loss"] > spike["limit"]) == (["loss_spike", FIRST_STEP, LAST_STEP], True)
    found = [rollback[name] for name in ("event", "step", "to_step", "wanted_step", "first_batch", "last_batch")]
    assert found == ["rollback", LAST_STEP, BEGIN, BEGIN, SKIPPED.first, SKIPPED.last]
    assert work.final_state(job) == work.final_state(spared)
    assert newest(job).skipped_batches == (SKIPPED,)
    assert newest(job).rollbacks == 1
    losses = [record["loss"] for record in read_metrics(job.run_folder)]
    assert losses == [record["loss"] for record in read_metrics(spared.run_folder)]
    assert list(newest(job).recent_losses) == losses[-16:]
    assert "1 loss_spike, 1 rollback" in summarize(open_run(job.root, job.run))
    assert len(warnings_of(EventTail(job).read())) == 1


@pytest.mark.slow
def test_workers_intervals_stops_and_kills_change_no_bit_of_a_run_that_goes_back(
    new_job: NewJob, spared: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = new_job("two", **work.SPIKY, parallel__data_parallel_size="2")
    work.run_group(work.train_with_a_ruinous_batch, two, 2, two.run_folder)
    rare = new_job("rare", **work.SPIKY | {"checkpoint__interval_steps": "20"})
    work.train_with_a_ruinous_batch(rare, ALONE)
    assert read_events(rare.run_folder)[1]["to_step"] == 0  # the initial weights
    stopped = [new_job("stopped", **work.SPIKY, train__max_steps=steps) for steps in ("7", "14", "20")]
    for job in stopped:
        work.train_with_a_ruinous_batch(job, ALONE)
    assert kinds(stopped[0]) == ["loss_deviates_at_end", "loss_spike", "rollback"]
    killed = new_job("killed", **work.SPIKY)
    for kill in (kill_in_the_removal, kill_after_the_rollback):
        with monkeypatch.context() as patch:
            kill(patch)
            with pytest.raises(KeyboardInterrupt):
                work.train_with_a_ruinous_batch(killed, ALONE)
    assert list(checkpoints(killed.root))[-1] == "step-00000008"  # nothing of the abandoned steps is found
    work.train_with_a_ruinous_batch(killed, ALONE)
    assert kinds(killed) == ["loss_spike", *["loss_spike", "rollback"] * 2]

    assert {work.final_state(job) for job in (two, rare, stopped[0], killed)} == {work.final_state(spared)}


def kill_in_the_removal(patch: pytest.MonkeyPatch) -> None:
    """Kill the run when it has removed one of the two checkpoints that it abandons."""
    removed: list[str] = []

    def remove(path: Any) -> None:
        if removed and removed[-1] == "step-00000014":
            raise KeyboardInterrupt
        removed.append(path.name)
        discard(path)

    patch.setattr(retention, "discard", remove)


def kill_after_the_rollback(patch: pytest.MonkeyPatch) -> None:
    """Kill the run, which continues from step 12, when it has gone back and repeats an earlier step."""

    def end(program: Program) -> None:
        raise KeyboardInterrupt

    work.before_step(patch, BEGIN + 1, end)


def test_a_transient_that_heals_is_left_alone(new_job: NewJob, monkeypatch: pytest.MonkeyPatch, spared: Job) -> None:
    job, plain = new_job("transient", **work.SPIKY), new_job("plain")
    work.raise_losses(monkeypatch, 11, 12)
    for each in (job, plain):
        train_here(each)

    [event] = read_events(job.run_folder)
    assert (event["event"], event["step"]) == ("loss_healed", 14)
    assert newest(job).skipped_batches == ()
    assert work.final_state(job) == work.final_state(plain) != work.final_state(spared)


def test_a_run_whose_rollbacks_are_exhausted_goes_on_with_a_warning(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(**work.SPIKY, train__loss_spike_max_rollbacks="1")
    work.ruin_weights(monkeypatch, work.RUINOUS_BATCH, 15)
    train_here(job)

    assert kinds(job) == ["loss_spike", "rollback", "loss_spike", "rollbacks_exhausted"]
    assert len(read_metrics(job.run_folder)) == 20
    assert newest(job).skipped_batches == (SKIPPED,)
    assert len(warnings_of(EventTail(job).read())) == 2


def test_losses_that_are_not_finite_take_the_run_back_before_they_end_it(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train__loss_spike_patience_steps": "5", "train__max_consecutive_skipped_steps": "2"}
    job, rewind = new_job(**work.SPIKY | settings), Training.rewind

    def end_of_poison(training: Training, spike: Any) -> None:
        monkeypatch.undo()
        program = training._program
        program._run_loss = program._after_layers(program._micro_loss)
        rewind(training, spike)

    work.poison(monkeypatch, *range(11, 16))
    monkeypatch.setattr(Training, "rewind", end_of_poison)
    train_here(job)

    assert kinds(job) == ["nan"] * 3 + ["loss_spike", "rollback"]
    assert newest(job).skipped_batches == (BatchRange(first=7, last=13),)


def test_settings_change_in_the_middle_of_a_run(new_job: NewJob) -> None:
    job = train_new(new_job, train__max_steps="6")
    watched = new_job(**work.SPIKY)
    work.train_with_a_ruinous_batch(watched, ALONE)

    assert kinds(job) == ["loss_spike", "rollback"]

    longer = train_new(new_job, train__max_steps="21")
    assert newest(longer) == LossSpikes(skipped_batches=(SKIPPED,), rollbacks=1)  # skipped for good


def test_batches_after_skipped_ranges_move(tmp_path: Path) -> None:
    detector = SpikeDetector(make_recipe(tmp_path, **work.SPIKY))
    skipped = (BatchRange(first=2, last=3), BatchRange(first=5, last=5))
    detector.go_back(LossSpikes(skipped_batches=skipped))
    assert [detector.batch_of(step) for step in range(5)] == [0, 1, 4, 6, 7]
    assert detector.skip(from_step=1, last_batch=4) == BatchRange(first=1, last=4)
    assert detector.state.skipped_batches == (BatchRange(first=1, last=5),)  # ranges that touch are one
    assert [detector.batch_of(step) for step in range(3)] == [0, 6, 7]


def test_the_checkpoints_of_a_rollback_are_few_and_always_there(tmp_path: Path) -> None:
    recipe, kept = make_recipe(tmp_path, **work.SPIKY | {"checkpoint__interval_steps": "1"}), set[int]()
    train_settings = recipe.train
    for step in range(1, 500):
        kept = retention.rollback_checkpoints([*kept, step], train_settings) | {step}
        assert len(kept) <= retention.most_checkpoints(recipe) - recipe.checkpoint.keep_latest
        first_deviating = step + 2 - 2 * train_settings.loss_spike_patience_steps
        wanted = first_deviating - 1 - train_settings.loss_spike_rollback_steps
        assert wanted < 1 or min(kept) <= wanted


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 100), marks=pytest.mark.slow)], ids=str)
def test_curves_without_spikes_trigger_none_and_each_planted_spike_is_found(tmp_path: Path, seeds: range) -> None:
    recipe = make_recipe(tmp_path, **WATCHED, train__loss_spike_window="64")
    for seed in seeds:
        generator = np.random.default_rng(seed)
        losses, norms = loss_curve(generator, 160, recipe)
        losses[60:70] += generator.uniform(0.5, 3)  # a transient that is shorter than the patience
        losses[140:] += generator.uniform(1.5, 3)
        assert first_spike(SpikeDetector(recipe), losses, norms) == 140 + recipe.train.loss_spike_patience_steps, seed


@pytest.mark.parametrize("rise", [0.01, 0.02])
def test_a_slow_divergence_is_found_near_its_begin(tmp_path: Path, rise: float) -> None:
    """A limit that followed the rising losses would find it late, and leave out the wrong batches."""
    detector = SpikeDetector(make_recipe(tmp_path, **WATCHED, train__loss_spike_window="128"))
    losses = 3 + 0.03 * np.random.default_rng(0).standard_normal(600)
    losses[400:] += rise * np.arange(200)
    confirmed = first_spike(detector, losses, np.ones(600))
    assert confirmed is not None
    assert 400 < detector.first_step < confirmed < 450


def loss_curve(generator: np.random.Generator, length: int, recipe: Recipe) -> tuple[Numbers, Numbers]:
    """Make losses and gradient norms of a run: a descent by a power law, heavy-tailed noise and a slow wander."""
    steps, begin = np.arange(length), untrained_loss(recipe.model)
    end, half_life = begin * generator.uniform(0.2, 0.6), generator.uniform(10, 100)
    warm_up = np.minimum(1, steps / generator.choice([5, 30, 200]))
    trend = end + (begin - end) * (1 + np.cumsum(warm_up) / half_life) ** -generator.uniform(0.2, 0.8)
    scatter, wander = 10 ** generator.uniform(-2, -1), np.zeros(length)
    for step in range(1, length):
        wander[step] = 0.98 * wander[step - 1] + 0.2 * scatter * generator.standard_normal()
    noise = scatter * generator.standard_t(4, length) / math.sqrt(2)
    norms = np.exp(0.3 * generator.standard_t(4, length)) * (0.3 + 3 / (1 + steps / 20))
    return trend + wander + noise, norms


def first_spike(detector: SpikeDetector, losses: Numbers, norms: Numbers) -> int | None:
    for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True), start=1):
        if detector.add(step, loss, norm, detector.deviation(loss, norm)) is Verdict.SPIKE:
            return step
    return None


def test_a_high_gradient_norm_confirms_nothing_but_begins_a_spike(tmp_path: Path) -> None:
    settings = {"train__loss_spike_window": "16", "train__loss_spike_patience_steps": "4"}
    detector = SpikeDetector(make_recipe(tmp_path, **WATCHED, **settings))
    steps = [(3.0, 1.0)] * 16 + [(3.0, 50.0)] + [(3.0, 1.0)] * 3 + [(3.0, 50.0)] * 2 + [(5.0, 1.0)] * 4
    verdicts = [
        detector.add(step, loss, norm, detector.deviation(loss, norm)) for step, (loss, norm) in enumerate(steps, 1)
    ]
    assert [verdicts.count(each) for each in Verdict] == [22, 3, 0, 1]
    assert detector.first_step == 21
