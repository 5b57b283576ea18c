"""Copies of the state in the memory of nodes: what a run continues from after a loss, and what they cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.artifacts.manifest import read_sealed
from services.common.errors import ArtifactError, LimitError, WorkersLost
from services.common.recipe.memory_estimate import checkpoint_bytes
from services.trainer.checkpoints import memory
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics.commands import recording_command
from services.trainer.metrics.events import count_events
from services.trainer.metrics.records import read_attempts, read_metrics
from services.trainer.tests import work
from services.trainer.tests.builders import ALONE, NewJob, train_here, train_new
from services.trainer.tests.runs import checkpoints, file_states, flip_a_bit, state_hash

TWELVE = {"train__max_steps": "12", "checkpoint__interval_steps": "5", "parallel__zero_stage": "1"}
COPIED = {**TWELVE, "checkpoint__memory_interval_steps": "2"}
SPIKY = {**work.SPIKY, "checkpoint__memory_interval_steps": "1"}
"""Overrides of a run that goes back from step 15, with a checkpoint after even steps and a copy after odd ones."""


@pytest.fixture(scope="module")
def straight(new_shared_job: NewJob) -> Job:
    return train_new(new_shared_job, **TWELVE)


@pytest.fixture
def job(new_job: NewJob) -> Iterator[Job]:
    """A run that leaves nothing in memory."""
    job = new_job(**COPIED)
    with recording_command(job):  # by which all starts of this run alone find its copies
        pass
    yield job
    assert not folders_of(job)


def folders_of(job: Job) -> list[Path]:
    return sorted(memory.MEMORY.glob(f"millrace-{job.run}-{job.attempt[:8]}/node-*"))


@pytest.mark.parametrize(
    ("is_node_lost", "full_step", "damaged", "workers", "resumed"),
    [
        (True, None, "", 1, 8),
        (True, None, "00000008", 2, 6),
        (True, None, "0000000[68]", 2, 5),
        (True, 8, "", 2, 6),
        (False, None, "", 2, 6),
    ],
    ids=["node", "node and newest copy", "node and all copies", "node that was full", "worker in a copy"],
)
def test_a_run_continues_from_the_newest_copy_of_which_all_shards_are_left_and_intact(
    job: Job,
    new_job: NewJob,
    straight: Job,
    is_node_lost: bool,
    full_step: int | None,
    damaged: str,
    workers: int,
    resumed: int,
) -> None:
    with pytest.raises(WorkersLost):
        work.run_group(work.train_and_lose_a_node, (job, not is_node_lost, full_step), 2, job.run_folder)
    first, second = folders_of(job)
    for copy in first.glob(f"{damaged}-00000/shard-*"):
        flip_a_bit(copy)
    (first / "00000009-00000").mkdir()  # as where its removal was cut short
    if is_node_lost:
        shutil.rmtree(second)

    again = new_job(**COPIED, parallel__data_parallel_size=str(workers))
    work.run_group(work.train_on_two_nodes if workers == 2 else train, again, workers, job.run_folder)

    (attempt,) = read_attempts(job.run_folder)
    assert (attempt["first_step"], attempt["last_step"]) == (resumed, 12)
    counts = count_events(job.run_folder)
    assert (counts.get("recovered", 0), counts.get("copy_left_out", 0)) == (resumed != 5, full_step is not None)
    records, expected = read_metrics(job.run_folder), read_metrics(straight.run_folder)
    assert [(each["step"], each["loss"]) for each in records] == [(each["step"], each["loss"]) for each in expected]
    last, same = (checkpoints(each.root)["step-00000012"] for each in (job, straight))
    assert state_hash(last) == state_hash(same)


@pytest.mark.parametrize("settings", [COPIED, TWELVE], ids=["copies again", "copies no more"])
def test_copies_of_another_program_are_taken_when_told_and_stay_otherwise(
    job: Job, new_job: NewJob, settings: dict[str, str]
) -> None:
    """ZeRO-3 is another program."""
    with pytest.raises(WorkersLost):
        work.run_group(work.train_and_lose_a_node, (job, False, None), 2, job.run_folder)
    before = [*map(file_states, folders_of(job))]
    shutil.rmtree(job.checkpoint_collection)
    again = new_job(**settings | {"parallel__zero_stage": "3", "checkpoint__keep_latest": "3"})

    with pytest.raises(ArtifactError, match=f"{job.run}.* step 8 .*--allow-changed-program"):
        work.run_group(work.train_on_two_nodes, again, 2, job.run_folder)
    assert [*map(file_states, folders_of(job))] == before
    work.run_group(work.train_on_two_nodes, replace(again, allows_changed_program=True), 2, job.run_folder)

    (attempt,) = read_attempts(job.run_folder)
    assert (attempt["first_step"], attempt["last_step"]) == (8, 12)
    recovered, last = (read_sealed(checkpoints(job.root)[f"step-{step:08d}"])["checkpoint"] for step in (8, 12))
    assert recovered["program_fingerprint"] == job.program_fingerprint != last["program_fingerprint"]
    assert (recovered["waivers"], last["waivers"]) == ([], ["--allow-changed-program"])


def test_a_rollback_goes_on_where_the_memory_of_a_node_is_full(job: Job, new_job: NewJob) -> None:
    spiky, alone = new_job(**SPIKY), new_job("alone", **work.SPIKY)
    work.run_group(work.train_with_a_full_node, spiky, 2, job.run_folder)
    work.train_with_a_ruinous_batch(alone, ALONE)

    assert count_events(job.run_folder) == {"copy_left_out": 2, "loss_spike": 1, "rollback": 1}
    assert work.final_state(spiky) == work.final_state(alone)


def test_copies_of_before_a_rollback_are_not_taken_from_a_node_that_comes_back(job: Job, new_job: NewJob) -> None:
    spiky, alone = new_job(**SPIKY), new_job("alone", **work.SPIKY)
    with pytest.raises(WorkersLost):
        work.run_group(work.train_and_die_after_a_rollback, spiky, 2, job.run_folder)
    first, second = folders_of(job)
    for folder in (first, second):
        shutil.rmtree(folder)
    assert {path.name for path in (job.run_folder / "node-1").iterdir()} >= {"00000013-00000", "00000013-00001"}
    shutil.move(job.run_folder / "node-1", second)
    work.run_group(work.train_on_two_nodes, spiky, 2, job.run_folder)
    work.train_with_a_ruinous_batch(alone, ALONE)

    (attempt,) = read_attempts(job.run_folder)
    assert (attempt["first_step"], count_events(job.run_folder)["rollback"]) == (10, 1)
    assert work.final_state(spiky) == work.final_state(alone)


def test_a_copy_writes_a_workers_shard_and_sends_it_once(job: Job) -> None:
    work.run_group(work.count_copies, job, 2, job.run_folder)

    counts = [json.loads((job.run_folder / f"counts-{rank}.json").read_text()) for rank in range(2)]
    for ours, theirs in (counts, counts[::-1]):
        shards = ours["write_packed"]
        assert len(shards) == 5  # after 2, 4 and so on: the last step has a checkpoint
        assert ours["isend"] == [4, *(each for shard in shards for each in (memory.ENTRY_BYTES, shard))]
        assert ours["recv"] == theirs["isend"]
    state_bytes = checkpoint_bytes(job.recipe)
    assert state_bytes < sum(each["write_packed"][0] for each in counts) < 1.1 * state_bytes  # with the files' headers


def test_nodes_without_room_for_copies_are_refused_at_the_start(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(memory.MEMORY)._replace(free=300_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LimitError, match=r"0\.29 MiB.*checkpoint\.memory_interval_steps"):
        train_here(job)
