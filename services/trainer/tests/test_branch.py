"""A run that begins with another run's checkpoint: the parent's bits where nothing changes, and data seen once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from services.common.artifacts.checkpoint import checkpoint_id, shard_name
from services.common.errors import ArtifactError, RecipeError, WorkersLost
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.trainer.checkpoints.loader import find_checkpoint
from services.trainer.checkpoints.lookup import open_checkpoint
from services.trainer.checkpoints.steps import checkpoint_steps
from services.trainer.data import sample_indices
from services.trainer.evaluation.records import read_evaluations
from services.trainer.job import Job
from services.trainer.metrics.events import read_events
from services.trainer.metrics.records import read_metrics
from services.trainer.runs.branch import require_same_vocabulary
from services.trainer.tests import work
from services.trainer.tests.builders import ALONE, NewJob, train_here, train_new
from services.trainer.tests.runs import flip_a_bit, state_hash

KEEPING = {"checkpoint__keep_latest": "10"}


@pytest.fixture(scope="module")
def parent(new_shared_job: NewJob) -> Job:
    """A run of 20 steps with checkpoints after 5, 10, 15 and 20; an epoch has 10 steps."""
    return train_new(new_shared_job, **KEEPING)


@pytest.fixture
def branch_off(new_shared_job: NewJob) -> NewJob:
    """Describe a branch of a run; overrides as `train__max_steps="30"`."""

    def branch(parent: Job, step: int, data: str = "continue", **overrides: str) -> Job:
        table = f'{{ run = "{parent.run}", step = {step}, data = "{data}" }}'
        return new_shared_job(train__branch=table, **{**KEEPING, **overrides})

    return branch


def numbers(job: Job, name: str, after: int = 0) -> list[Any]:
    return [record[name] for record in read_metrics(job.run_folder) if record["step"] > after and name in record]


def samples(job: Job, step: int) -> Counter[int]:
    """Return the samples that the workers read for a step, as `work.train_audited` has noted them."""
    lines = (job.run_folder / work.AUDIT).read_text(encoding="utf-8").splitlines()
    return Counter(each for line in map(json.loads, lines) if line["step"] == step for each in line["samples"])


def expected(job: Job, first: int, count: int) -> Counter[int]:
    num_samples = job.corpus.payload.num_samples("train")
    return Counter(sample_indices(num_samples, job.recipe.train.data_seed, first, count).tolist())


def test_a_branch_that_is_killed_and_goes_on_with_half_its_workers_has_the_parents_bits(
    parent: Job, branch_off: NewJob
) -> None:
    other = {"parallel__zero_stage": "1", "checkpoint__interval_steps": "4", "train__evaluation_interval_steps": "7"}
    branch = branch_off(parent, 5, **other)
    for number, own in enumerate([[], [8]]):  # the restart begins with the parent's checkpoint again
        killed = replace(branch, start_number=number)
        with pytest.raises(WorkersLost):
            work.run_group(work.train_and_die, killed, 2, branch.run_folder)
        assert checkpoint_steps(branch.checkpoint_collection) == own
    train_here(branch)

    assert branch.run != parent.run
    for name in ("step", "loss", "gradient_norm", "learning_rate", "tokens", "skipped_steps"):
        assert numbers(branch, name) == numbers(parent, name, after=5), name
    evaluations, of_parent = (read_evaluations(job.run_folder) for job in (branch, parent))
    assert [each["step"] for each in evaluations] == [5, 7, 14, 20]
    assert evaluations[-1]["loss"] == of_parent[-1]["loss"]
    assert state_hash(branch.checkpoint_address(20).path) == state_hash(parent.checkpoint_address(20).path)
    left = open_checkpoint(branch.checkpoint_collection, 20).manifest.checkpoint.parent
    assert left
    digest = open_checkpoint(parent.checkpoint_collection, 5).manifest.content_digest
    assert (left.run, left.step, left.content_digest) == (parent.run, 5, digest)


def test_another_batch_size_goes_on_with_the_next_sample(parent: Job, branch_off: NewJob) -> None:
    branch = branch_off(parent, 5, batch__global_batch_size="16", train__max_steps="9")
    work.train_audited(branch, ALONE)

    taken = [samples(branch, step) for step in range(5, 9)]
    assert taken == [expected(branch, 40 + 16 * number, 16) for number in range(4)]
    seen_by_parent, own_epoch = expected(parent, 0, 40), expected(branch, 40, 40)
    assert not seen_by_parent & own_epoch
    assert numbers(branch, "tokens") == [(40 + 16 * number) * 16 for number in range(1, 5)]


def test_a_branch_of_a_branch_on_another_corpus_sees_no_sample_twice(parent: Job, branch_off: NewJob) -> None:
    other = branch_off(parent, 5, corpus__rows_per_shard="16", train__max_steps="10")
    work.train_audited(other, ALONE)
    back = branch_off(other, 10, train__max_steps="12")
    work.train_audited(back, ALONE)

    assert samples(other, 5) == expected(other, 0, 8)
    assert samples(back, 10) == expected(parent, 40, 8)
    state = open_checkpoint(back.checkpoint_collection, 12).manifest.checkpoint
    assert [(each.run, each.step) for each in state.ancestors] == [(parent.run, 5), (other.run, 10)]
    assert [each.next_sample for each in state.ancestors] == [40, 40]
    assert state.tokens == 12 * 8 * 16


def test_data_is_seen_again_only_if_the_recipe_asks_for_it(parent: Job, branch_off: NewJob) -> None:
    with pytest.raises(RecipeError, match=r"data_seed is 7.*80 samples.*seed 0"):
        branch_off(parent, 10, train__data_seed="7")
    again = branch_off(parent, 10, data="restart", train__data_seed="7", train__max_steps="11")
    work.train_audited(again, ALONE)

    assert samples(again, 10) == expected(again, 0, 8)


def test_batches_that_the_parent_left_out_stay_out_and_a_changed_branch_compares_no_loss(
    new_shared_job: NewJob, branch_off: NewJob
) -> None:
    spikes = {**work.SPIKY, "optimizer__weight_decay": "0.2"}  # a run of its own
    parent = new_shared_job(**KEEPING, **spikes)
    work.train_with_a_ruinous_batch(parent, ALONE)
    same, larger = branch_off(parent, 10, **spikes), branch_off(parent, 10, **spikes, batch__global_batch_size="16")
    faster = branch_off(parent, 10, **spikes, optimizer__learning_rate="2e-2")
    same, faster, larger, other = (
        replace(job, program_fingerprint=fingerprint)
        for job, fingerprint in [(each, parent.program_fingerprint) for each in (same, faster, larger)]
        + [(same, "other")]
    )
    inherited = [find_checkpoint(job, Mesh(0, 1), None)[0].loss_spikes for job in (same, faster, larger, other)]
    train_here(same)

    assert numbers(same, "loss") == numbers(parent, "loss", after=10)
    left = larger.lineage.parent
    assert left
    assert left.next_sample == 8 * 17  # ten batches and the seven that were left out
    assert larger.lineage.data_offset_samples + 10 * 16 == left.next_sample
    assert [bool(each.recent_losses) for each in inherited] == [True, False, False, False]
    assert [bool(each.skipped_batches) for each in inherited] == [True, True, False, True]


def test_an_early_spike_needs_no_checkpoint_that_the_parent_has_removed(
    new_shared_job: NewJob, branch_off: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = train_new(new_shared_job, **KEEPING, **work.SPIKY, optimizer__weight_decay="0.3", train__max_steps="10")
    branch = branch_off(parent, 10, **work.SPIKY, optimizer__weight_decay="0.3", train__max_steps="24")
    train_step = Program.train_step

    def remove_and_step(program: Program, step: int, *arguments: Any) -> Any:
        if step == 13:
            shutil.rmtree(parent.checkpoint_address(10).path, ignore_errors=True)
        return train_step(program, step, *arguments)

    monkeypatch.setattr(Program, "train_step", remove_and_step)
    work.train_with_a_ruinous_batch(branch, ALONE)

    rollback, *_ = [event for event in read_events(branch.run_folder) if event["event"] == "rollback"]
    assert (rollback["wanted_step"], rollback["to_step"]) == (10 - 2, 12)
    assert checkpoint_steps(branch.checkpoint_collection)[-1] == 24


def test_another_model_or_vocabulary_is_refused(parent: Job, branch_off: NewJob, new_shared_job: NewJob) -> None:
    with pytest.raises(RecipeError, match=r"(?s)intermediate_size.*32.*64"):
        branch_off(parent, 10, model__intermediate_size="64")
    same = branch_off(parent, 10, corpus__rows_per_shard="16")
    other = new_shared_job(kind="tokenizer_json", corpus__min_document_bytes="7")
    found = open_checkpoint(parent.checkpoint_collection, 10)

    require_same_vocabulary(same.root, found, same.recipe, same.corpus)
    with pytest.raises(RecipeError, match="tokenizer"):
        require_same_vocabulary(other.root, found, other.recipe, other.corpus)


def test_a_branch_needs_its_parents_checkpoint_until_it_has_its_own(new_job: NewJob) -> None:
    parent = train_new(new_job, train__max_steps="10")
    branch_at = {"train__branch": f'{{ run = "{parent.run}", step = 5 }}', "train__max_steps": "10"}
    branch, damaged = new_job(**branch_at), parent.checkpoint_address(5).path / shard_name(0)
    flip_a_bit(damaged)
    with pytest.raises(ArtifactError, match=rf"(?s){checkpoint_id(5)}.*{shard_name(0)}"):
        train_here(replace(branch, start_number=1))
    assert checkpoint_steps(branch.checkpoint_collection) == []

    flip_a_bit(damaged)
    train_here(branch)
    shutil.rmtree(damaged.parent)
    assert new_job(**branch_at).run == branch.run
    train_here(new_job(**{**branch_at, "train__max_steps": "12"}))
    assert checkpoint_steps(branch.checkpoint_collection) == [10, 12]

    shutil.rmtree(branch.checkpoint_collection)
    with pytest.raises(ArtifactError, match=rf"{parent.run}.*\b5\b.*\b10\b"):
        new_job(**branch_at)
