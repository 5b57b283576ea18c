"""Functions that the tests run as workers, importable by other processes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.common.artifacts.checkpoint import CheckpointPayload, shard_name
from services.common.artifacts.manifest import FileEntry
from services.common.errors import WorkersLost
from services.common.launch import inline
from services.common.launch.launcher import WorkerEnvironment, WorkerGroupSpec, run_workers
from services.common.process.shutdown import StopReason
from services.common.program import process_group
from services.common.program.mesh import Axis, Mesh
from services.common.program.micro_batch import MicroBatch
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program, StepResult
from services.common.recipe.schema import Recipe
from services.common.testing.waiting import wait_until
from services.trainer.agreement import StepAgreement, StepOutcome, TakenStep, WorkerStep, require_same_outcome
from services.trainer.checkpoints import memory
from services.trainer.checkpoints.memory import MemoryCheckpoints
from services.trainer.checkpoints.shards import write_packed
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.data import micro_batches
from services.trainer.job import Job
from services.trainer.loop import Training, train
from services.trainer.mixture import Mixture
from services.trainer.supervision.stop import request_stop
from services.trainer.supervision.supervise import train_on_node
from services.trainer.tests.runs import checkpoints, flip_a_bit, state_hash
from services.trainer.workers.node_staging import prepare_node
from services.trainer.workers.worker import joined_group

COLLECTIVE_SECONDS = 3.0
SLOW_SECONDS = 4.5
EVALUATION_BATCHES = 6
AGREED_STEPS = 20
AUDIT = "audit.jsonl"
"""Name of the file in the run's folder with the samples that each worker read."""


def run_group(function: Callable[[Any, WorkerEnvironment], None], argument: Any, size: int, folder: Path) -> None:
    """Run a function as all workers of an inline group that meet in a folder."""
    run_workers(inline, function, argument, WorkerGroupSpec(size, 1, size, folder))


def train_on_node_by(train: Callable[[Job, WorkerEnvironment], None], job: Job, environment: WorkerEnvironment) -> None:
    """Do what a worker of the command does, with another function that trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.trainer.supervision.supervise.train", train)
        train_on_node(job, environment)


def train_slowly(job: Job, environment: WorkerEnvironment) -> None:
    """Train with a timeout of COLLECTIVE_SECONDS for collectives, while all work besides steps takes longer."""
    write, losses, patch = CheckpointWriter._write, Program._micro_losses, pytest.MonkeyPatch()
    patch.setattr(process_group, "COLLECTIVE_TIMEOUT", timedelta(seconds=COLLECTIVE_SECONDS))

    def prepare_slowly(job: Job) -> None:
        if environment.rank == 1:  # as on a node with a large compile cache to copy
            time.sleep(SLOW_SECONDS)
        prepare_node(job)

    def write_slowly(*arguments: Any) -> Any:
        if environment.rank == 1:
            time.sleep(SLOW_SECONDS)
        return write(*arguments)

    def evaluate_slowly(program: Program, *micro_batch: Any) -> torch.Tensor:
        time.sleep(SLOW_SECONDS / EVALUATION_BATCHES)
        return losses(program, *micro_batch)

    patch.setattr("services.trainer.loop.prepare_node", prepare_slowly)
    patch.setattr(CheckpointWriter, "_write", write_slowly)
    patch.setattr(Program, "_micro_losses", evaluate_slowly)
    _meet(job, environment)
    train(job, environment)


def place_on_nodes(environment: WorkerEnvironment, num_nodes: int) -> WorkerEnvironment:
    """Return the environment of a worker of this machine as one of several nodes, which it shares with others."""
    local_world_size = environment.world_size // num_nodes
    node_rank, local_rank = divmod(environment.rank, local_world_size)
    return replace(environment, local_rank=local_rank, local_world_size=local_world_size, node_rank=node_rank)


def train_on_two_nodes(job: Job, environment: WorkerEnvironment) -> None:
    """Train on two nodes, whose first workers agree by sockets on loopback."""
    train(job, place_on_nodes(environment, 2))


def agree_in_turns(call: tuple[Path, int, int], environment: WorkerEnvironment) -> None:
    """Agree on AGREED_STEPS steps, at one of which one rank hears SIGTERM; in the last one it alone skips the update.

    Write the agreed stop reasons, and the error with which the last step ends.
    """
    folder, hears, at = call
    delays, agreed = random.Random(environment.rank), list[int]()
    with joined_group(environment) as group:
        agreement = StepAgreement(group)
        for number in range(AGREED_STEPS):
            time.sleep(0.002 * delays.random())
            is_heard = environment.rank == hears and number == at
            agreement.start(WorkerStep(StopReason.SIGTERM if is_heard else StopReason.NONE, written_step=1))
            time.sleep(0.002 * delays.random())  # the next step
            agreed.append(agreement.finish().stop_reason)
        is_applied = environment.rank != hears
        agreement.start(WorkerStep(StopReason.NONE, 0, is_applied=is_applied))
        with pytest.raises(WorkersLost) as raised:
            require_same_outcome(agreement.finish(), is_applied, group, 7)
    found = {"stop reasons": agreed, "error": str(raised.value)}
    (folder / f"{environment.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def count_group_costs(folder: Path, environment: WorkerEnvironment) -> None:
    """Write this worker's share of the bytes in the group's store, and its open descriptors, in the middle of a run."""
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with joined_group(place_on_nodes(environment, environment.world_size // 4)) as group:
        agreement = StepAgreement(group)
        group.gather(group.rank)
        for _ in range(3):
            agreement.start(WorkerStep(StopReason.NONE, written_step=1))
            assert agreement.finish().is_applied_by_some
        store_bytes = Path(environment.rendezvous).stat().st_size / environment.world_size
        counts = {"store bytes": store_bytes, "descriptors": len(list(descriptors.iterdir())) - before}
        (folder / f"{environment.rank}.json").write_text(json.dumps(counts), encoding="utf-8")


def train_on_unlike_nodes(job: Job, environment: WorkerEnvironment) -> None:
    """Train while rank 1 multiplies matrices in another arithmetic."""
    if environment.rank == 1:
        os.environ["DNNL_DEFAULT_FPMATH_MODE"] = "BF16"
    train(job, environment)


def before_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[Program], object]) -> None:
    """Let this worker do something before the step that follows `number` steps."""
    train_step = Program.train_step

    def act_and_train(program: Program, step: int, *arguments: Any) -> Any:
        if step == number:
            act(program)
        return train_step(program, step, *arguments)

    patch.setattr(Program, "train_step", act_and_train)


def end_by(signum: signal.Signals) -> Callable[[Program], None]:
    return lambda program: os.kill(os.getpid(), signum)


def train_with_a_faulty_worker(call: tuple[Job, Axis | None], environment: WorkerEnvironment) -> None:
    """Train while one weight of rank 1 is wrong after the seventh step: of those that it shares along an axis."""
    job, axis = call

    def err(program: Program) -> None:
        next(each for each in program.buckets if each.sum_axis == axis).weights_P[0].add_(1e-3)

    if environment.rank == 1:
        before_step(pytest.MonkeyPatch(), 7, err)
    train(job, environment)


def train_with_a_worker_that_freezes(job: Job, environment: WorkerEnvironment) -> None:
    """Rank 1 of the first start is stopped in its seventh step, as a debugger or a node without memory would.

    That start waits for its checkpoints: a freeze while one is still being written would leave it uncommitted.
    """
    frozen, patch = job.run_folder / "frozen", pytest.MonkeyPatch()

    def freeze(program: Program) -> None:
        if environment.rank == 1 and not frozen.exists():
            frozen.touch()
            end_by(signal.SIGSTOP)(program)

    before_step(patch, 6, freeze)
    if not frozen.exists():
        commit_at_once(patch)
    train(job, environment)


def commit_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let each checkpoint be committed before the next step."""
    save = CheckpointWriter.save

    def save_and_commit(writer: CheckpointWriter, *arguments: Any) -> None:
        save(writer, *arguments)
        writer.wait()

    patch.setattr(CheckpointWriter, "save", save_and_commit)


def train_with_a_worker_that_errs_once(job: Job, environment: WorkerEnvironment) -> None:
    """Rank 1 of the first start computes one micro-batch of its eighth step wrongly."""
    if job.start_number == 0 and environment.rank == 1:
        poison(pytest.MonkeyPatch(), 7, is_once=True)
    train(job, environment)


def train_and_die_in_a_save(job: Job, environment: WorkerEnvironment) -> None:
    """Audited. Rank 2 is killed when it has written half of its shard of the second checkpoint."""

    with pytest.MonkeyPatch.context() as patch:
        die_in_a_write(patch, "writer", lambda folder, name: name == shard_name(2) and bool(checkpoints(job.root)))
        train_audited(job, environment)


def die_in_a_write(patch: pytest.MonkeyPatch, module: str, is_last: Callable[[Path, str], bool]) -> None:
    """Let this worker be killed when it has written half of the shard in this folder with this name."""

    def write_half(folder: Path, name: str, packed: bytes) -> FileEntry:
        entry = write_packed(folder, name, packed)
        if is_last(folder, name):
            os.truncate(folder / entry.path, entry.bytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return entry

    patch.setattr(f"services.trainer.checkpoints.{module}.write_packed", write_half)


def train_and_lose_a_node(call: tuple[Job, bool, int | None], environment: WorkerEnvironment) -> None:
    """Train on two nodes, whose memory has each copy before the next step. Rank 1 is killed in its step 10, or when it
    has written half of its copy of step 8. Its node has no room for a copy of `full_step`.
    """
    (job, dies_in_a_write, full_step), patch, have_room = call, pytest.MonkeyPatch(), MemoryCheckpoints._have_room

    def have_none(copies: MemoryCheckpoints, step: int) -> bool:
        with pytest.MonkeyPatch.context() as within:
            if step == full_step and environment.rank == 1:
                within.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            return have_room(copies, step)

    patch.setattr(MemoryCheckpoints, "_have_room", have_none)
    if environment.rank == 1 and dies_in_a_write:
        die_in_a_write(patch, "memory", lambda folder, name: folder.name.startswith("00000008"))
    elif environment.rank == 1:
        before_step(patch, 9, end_by(signal.SIGKILL))
    keep_at_once(patch)
    commit_at_once(patch)
    train(job, place_on_nodes(environment, 2))


def train_with_a_full_node(job: Job, environment: WorkerEnvironment) -> None:
    """Train on two nodes with a ruinous batch. The memory of the second one is full when it writes its copy of the
    step 13, before the run goes back and once more after that.
    """
    copy, patch = MemoryCheckpoints._copy, pytest.MonkeyPatch()

    def find_no_room(folder: Path, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    def copy_into_a_full_node(copies: MemoryCheckpoints, payload: CheckpointPayload, pack: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            if payload.step == 13 and environment.rank == 1:
                within.setattr(memory, "write_packed", find_no_room)
            return copy(copies, payload, pack)

    patch.setattr(memory, "COLLECTIVE_TIMEOUT", timedelta(seconds=60))
    patch.setattr(MemoryCheckpoints, "_copy", copy_into_a_full_node)
    commit_at_once(patch)
    train_with_a_ruinous_batch(job, place_on_nodes(environment, 2))


def train_and_die_after_a_rollback(job: Job, environment: WorkerEnvironment) -> None:
    """Train on two nodes with a ruinous batch. The memory of the second one is copied into the run's folder before the
    run goes back, and rank 1 is killed in the step 12 after that.
    """
    rewind, patch = Training.rewind, pytest.MonkeyPatch()

    def rewind_and_die(training: Training, spike: StepOutcome) -> None:
        if environment.rank == 1:
            shutil.copytree(training._memory._folder / "node-1", job.run_folder / "node-1")
            before_step(patch, 11, end_by(signal.SIGKILL))
        rewind(training, spike)

    patch.setattr(Training, "rewind", rewind_and_die)
    keep_at_once(patch)
    commit_at_once(patch)
    train_with_a_ruinous_batch(job, place_on_nodes(environment, 2))


def keep_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let each copy in memory be complete before the next step."""
    save = MemoryCheckpoints.save

    def save_and_wait(memory: MemoryCheckpoints, *arguments: Any) -> None:
        save(memory, *arguments)
        memory._group.wait_for_work(memory._copying.result if memory._copying else lambda: None)

    patch.setattr(MemoryCheckpoints, "save", save_and_wait)


def count_copies(job: Job, environment: WorkerEnvironment) -> None:
    """Train on two nodes, and write the bytes that this worker wrote, sent and received for copies in memory.

    For a copy the workers gather and broadcast nothing.
    """
    patch, counts, keep = pytest.MonkeyPatch(), defaultdict[str, list[int]](list), Training.keep

    def count(where: object, name: str, size: Callable[..., int]) -> None:
        counted = getattr(where, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name].append(size(*arguments))
            return counted(*arguments, **options)

        patch.setattr(where, name, call)

    def keep_alone(training: Training, step: TakenStep) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(ProcessGroup, "gather", None)
            within.setattr(ProcessGroup, "_broadcast", None)
            keep(training, step)

    count(memory, "write_packed", lambda folder, name, packed: len(packed))
    count(dist, "isend", lambda tensor, peer: tensor.nbytes)
    count(dist, "recv", lambda tensor, peer: tensor.nbytes)
    patch.setattr(Training, "keep", keep_alone)
    train(job, place_on_nodes(environment, 2))
    (job.run_folder / f"counts-{environment.rank}.json").write_text(json.dumps(counts), encoding="utf-8")


def train_and_die(job: Job, environment: WorkerEnvironment) -> None:
    """Rank 1 is killed in its step 7, and after a restart in its step 11."""
    patch = pytest.MonkeyPatch()
    if environment.rank == 1:
        before_step(patch, 10 if job.start_number else 6, end_by(signal.SIGKILL))
    commit_at_once(patch)
    train(job, environment)


def train_until_preempted(job: Job, environment: WorkerEnvironment) -> None:
    """Audited. A stop is requested in step 14, of which all workers hear while they take the next one."""
    with pytest.MonkeyPatch.context() as patch:
        if environment.rank == 0:
            before_step(patch, 13, lambda program: request_stop(job.run_folder, StopReason.PREEMPTION))
        train_audited(job, environment)


def train_audited(job: Job, environment: WorkerEnvironment) -> None:
    """Train while all workers write the samples of a step to AUDIT before they take the step."""

    def note(stream: Mixture, recipe: Recipe, step: int, mesh: Mesh, offset: int) -> list[MicroBatch]:
        samples, read = list[int](), stream.read

        def listen(each: Any) -> Any:
            samples.extend(each.tolist())
            return read(each)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "read", listen)
            batches = list(micro_batches(stream, recipe, step, mesh, offset))
        line = {"attempt": job.attempt, "rank": environment.rank, "step": step, "samples": samples}
        with (job.run_folder / AUDIT).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")  # in one piece: it is short
        return batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.trainer.loop.micro_batches", note)
        train(job, environment)


SPIKY = {
    "train__loss_spike_sigma": "6",
    "train__loss_spike_window": "16",
    "train__loss_spike_patience_steps": "3",
    "train__loss_spike_rollback_steps": "4",
    "checkpoint__interval_steps": "2",
}
"""Overrides with which a run of 20 steps finds a loss spike and goes back."""
RUINOUS_BATCH = 11


def train_with_a_ruinous_batch(job: Job, environment: WorkerEnvironment) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ruin_weights(patch, RUINOUS_BATCH)
        train(job, environment)


def ruin_weights(patch: pytest.MonkeyPatch, *ruinous_batches: int) -> None:
    """Let the updates of some batches ruin the weights. Their own losses, measured before, are as usual."""

    def ruin(program: Program, result: StepResult) -> StepResult:
        program.buckets[0].weights_P.add_(1.0)
        return result

    _change_steps(patch, ruinous_batches, ruin)


def raise_losses(patch: pytest.MonkeyPatch, *hard_batches: int) -> None:
    """Let the losses of some batches be ten times as high, which leaves the weights alone."""
    _change_steps(patch, hard_batches, lambda _, result: result._replace(loss=result.loss * 10))


def _change_steps(
    patch: pytest.MonkeyPatch, chosen: Collection[int], change: Callable[[Program, StepResult], StepResult]
) -> None:
    train_step, batches = Program.train_step, []

    def read(stream: Mixture, recipe: Recipe, number: int, mesh: Mesh, offset: int) -> Any:
        batches.append(number)
        return micro_batches(stream, recipe, number, mesh, offset)

    def step(program: Program, *arguments: Any) -> StepResult:
        result = train_step(program, *arguments)
        return change(program, result) if batches[-1] in chosen else result

    patch.setattr("services.trainer.loop.micro_batches", read)
    patch.setattr(Program, "train_step", step)


def _meet(job: Job, environment: WorkerEnvironment) -> None:
    """Wait until all workers have been started: on a busy machine that takes longer than a collective may here."""
    (job.run_folder / f"ready-{environment.rank}").touch()
    wait_until(lambda: len(list(job.run_folder.glob("ready-*"))) >= environment.world_size, 120)


def train_in_turn(jobs: list[Job], environment: WorkerEnvironment) -> None:
    """Train one job after the other, disturbed as the name of its root says."""
    for number, job in enumerate(jobs):
        with pytest.MonkeyPatch.context() as patch:
            if job.root.name == "poisoned" and environment.rank == 3:
                poison(patch, 1)
            if job.root.name == "damaged" and environment.rank == 0 and checkpoints(job.root):
                flip_a_bit(checkpoints(job.root)["step-00000004"] / shard_name(2))
            train(job, replace(environment, rendezvous=f"{environment.rendezvous}-{number}"))


def final_state(job: Job) -> str:
    """Return the hash of the last state of a run of 20 steps."""
    return state_hash(checkpoints(job.root)["step-00000020"])


def poison(patch: pytest.MonkeyPatch, *poisoned_steps: int, is_once: bool = False) -> None:
    """Make this worker's gradients of some steps NaN, or with `is_once` only the first micro-batch's."""
    loss, train_step = Program._micro_loss, Program.train_step
    steps: list[int] = []
    calls: list[int] = []

    def remember(program: Program, step: int, *arguments: Any) -> Any:
        steps.append(step)
        return train_step(program, step, *arguments)

    def poisoned(program: Program, *inputs: Any) -> torch.Tensor:
        is_poisoned = steps[-1] in poisoned_steps and not (is_once and calls)
        calls.extend(steps[-1:] * is_poisoned)
        return loss(program, *inputs) * (torch.nan if is_poisoned else 1.0)

    patch.setattr(Program, "train_step", remember)
    patch.setattr(Program, "_micro_loss", poisoned)
