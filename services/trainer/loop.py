"""The training loop, as every worker runs it."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.choice import choose_backend
from services.common.program.backends.protocol import Backend
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.program.mesh import make_mesh
from services.common.program.optimizer import learning_rate
from services.common.program.step import Program
from services.common.program.worker_group import WorkerGroup
from services.common.recipe import fingerprint
from services.common.telemetry import configure_logging
from services.trainer.checkpoint import CheckpointSchedule, CheckpointWriter, load_checkpoint
from services.trainer.data import evaluation_batch, micro_batches, num_evaluation_batches
from services.trainer.divergence import ENDED_BY, SkippedSteps, diverged
from services.trainer.job import Job
from services.trainer.metrics import StepRecord
from services.trainer.node_staging import compile_cache_folder, new_cache_files, newest_checkpoint_on_node, prepare_node
from services.trainer.recorder import MetricsRecorder
from services.trainer.stop import StopConditions, StopReason, clear_stop, stopped

logger = logging.getLogger(__name__)


def train(job: Job, environment: WorkerEnvironment) -> None:
    """Train from the newest checkpoint to `train.max_steps`.

    Returns when the run is complete. Raises `TryAgain` or `Interrupted` when it stopped early: with a
    committed checkpoint, and on all workers after the same step. Raises `RecipeError` when its numbers diverged.
    """
    recipe, rank = job.recipe, environment.rank
    configure_logging("trainer", rank=rank, file=job.run_folder / "logs" / f"rank-{rank:05d}.log")
    # The group comes before all work: what may take long is waited for through it.
    group = WorkerGroup.join(rank, environment.world_size, environment.rendezvous)
    group.wait_for_work(lambda: prepare_node(job))
    require_same_program(job, group)
    backend = make_backend(job, environment)
    program = Program(recipe, backend)
    first_step, skipped_steps = group.wait_for_work(lambda: resume(job, program))
    require_same_step(job, group, first_step)
    training = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "train")
    validation = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "validation")
    stop_conditions = StopConditions(job, environment)
    skipped = SkippedSteps(job, skipped_steps)
    schedule = CheckpointSchedule(recipe)
    writer = CheckpointWriter(job, environment.world_size) if rank == 0 else None
    setup_seconds, training_since = time.time() - job.workers_started_at.timestamp(), time.perf_counter()
    reason, done = StopReason.NONE, first_step
    divergence: StepRecord | None = None

    with MetricsRecorder(job, rank, first_step) as recorder:
        while done < recipe.train.max_steps and not reason and not divergence:
            step, started = done, time.perf_counter()
            tokens = list(micro_batches(training, recipe.batch, recipe.train.seed, step, backend.mesh))
            data_seconds = time.perf_counter() - started
            result = backend.defer(program.train_step(step, tokens, skipped.total)._asdict()).read()
            is_applied = bool(result["is_applied"])
            skipped.count(is_applied)
            step_seconds = time.perf_counter() - started

            done = step + 1
            reason = StopReason(group.maximum(stop_conditions.check(done)))
            record = StepRecord(
                step=done,
                loss=result["loss"],
                gradient_norm=result["gradient_norm"],
                learning_rate=learning_rate(recipe.optimizer, step),
                step_seconds=step_seconds,
                data_seconds=data_seconds,
                skipped_steps=skipped.total,
                is_first_of_process=step == first_step,
            )
            is_saving = schedule.is_due(done, bool(reason), is_applied)
            if skipped.are_too_many or (is_saving and not is_finite(program)):
                is_saving, divergence = False, record
            recorder.begin(record)
            if is_saving:
                recorder.add(checkpoint_stall_seconds=save(program, group, writer, record))
                schedule.saved()
            if done == recipe.train.max_steps or done % recipe.train.evaluation_interval_steps == 0:
                # After the save, so that no checkpoint is lost to it.
                if is_saving:
                    recorder.hold()
                recorder.add(**evaluate(program, validation))
            if writer:
                writer.raise_failure()
            recorder.write()
        wait_for_writer(group, writer)
        attempt = {
            "started_at": job.workers_started_at.timestamp(),
            "setup_seconds": max(0.0, setup_seconds),
            "train_seconds": time.perf_counter() - training_since,
            "first_step": first_step,
            "last_step": done,
            "workers": environment.world_size,
            "launch": environment.launch,
            "ended_by": ENDED_BY if divergence else str(reason) if reason else "completion",
            **count_compile_misses(job, backend, group),
            "slowest_checkpoint_seconds": writer.slowest_seconds if writer else 0.0,
        }
        recorder.write_attempt(attempt)
    if reason and rank == 0:
        clear_stop(job.run_folder)
    group.barrier()  # a worker that ends with an error ends the group: rank 0 must have finished its duties
    group.leave()
    if divergence:
        raise diverged(job, divergence, skipped)
    if reason and done < recipe.train.max_steps:
        raise stopped(reason, done, job.run_folder)


def make_backend(job: Job, environment: WorkerEnvironment) -> Backend:
    """This worker's device, pointed at the node's copy of the compile cache."""
    backend_class = choose_backend()
    os.environ.update(backend_class.cache_environment(compile_cache_folder(job)))
    mesh = make_mesh(job.recipe, environment.rank, environment.world_size)
    backend = backend_class(mesh, job.recipe.parallel.threads_per_worker, job.recipe.train.reduction)
    if job.recipe.compile.require_warm:
        backend.require_warm_cache()
    return backend


def require_same_program(job: Job, group: WorkerGroup) -> None:
    """Raise `DeviceError` unless every worker's node gives the bits of the program that the command was started for.

    Replicas on unlike CPUs would drift apart, and no checkpoint would be that of the program that it names.
    """
    facts = program_facts(job.recipe)
    for rank, theirs in enumerate(group.gather(facts)):
        if theirs != facts:
            difference = explain_difference(theirs, facts, sides=(f"rank {rank}", f"rank {group.rank}"))
            raise DeviceError(
                f"the workers' nodes are of different kinds:\n{difference}\nRun all workers on one kind of node."
            )
    if fingerprint(facts) != job.program_fingerprint:
        raise DeviceError(
            f"the workers' nodes differ in CPU, compiler, library versions or environment from the command's node: "
            f"their program is {fingerprint(facts)[:12]}, the command's {job.program_fingerprint[:12]}. Run the "
            f"command and all workers on one kind of node."
        )


def resume(job: Job, program: Program) -> tuple[int, int]:
    """Load the newest checkpoint that verifies; (steps done, steps skipped), both 0 for a new run."""
    checkpoint = newest_checkpoint_on_node(job)
    if checkpoint is None:
        logger.info("starting a new run")
        return 0, 0
    load_checkpoint(checkpoint, program)
    state = checkpoint.manifest.checkpoint
    logger.info("resuming after step=%d from %s", state.step, checkpoint.path)
    return state.step, state.skipped_steps


def require_same_step(job: Job, group: WorkerGroup, first_step: int) -> None:
    """Raise `ArtifactError` when workers found different checkpoints: their weights would be mixed."""
    newest, oldest = group.maximum(first_step), -group.maximum(-first_step)
    if newest != oldest:
        raise ArtifactError(
            f"{job.checkpoint_collection}: one worker resumes after step {newest}, another after step {oldest}: not "
            f"all nodes can read the newest checkpoint. Run `python -m services.common.artifacts verify` on each of "
            f"them."
        )


def is_finite(program: Program) -> bool:
    """See `Program.is_finite`; waits for the device."""
    return bool(program.backend.defer({"is_finite": program.is_finite()}).read()["is_finite"])


def save(program: Program, group: WorkerGroup, writer: CheckpointWriter | None, record: StepRecord) -> float:
    """Begin a checkpoint of the state after a step; the seconds that training stood still for it.

    Rank 0 writes for all, since all hold the same state. Raises what the checkpoint before it failed with, and
    `DeviceError` when the workers' states differ: then none is made of them.
    """
    started = time.perf_counter()
    wait_for_writer(group, writer)
    require_same_state(program, group, record.step)
    weights, moments = program.weights(), program.moments()
    if writer:
        writer.save(weights, moments, record.step, record.skipped_steps, started)
    return time.perf_counter() - started


def wait_for_writer(group: WorkerGroup, writer: CheckpointWriter | None) -> None:
    """Return once the last checkpoint is committed, which may take longer than a collective."""
    group.wait_for_work(writer.wait if writer else lambda: None)


def require_same_state(program: Program, group: WorkerGroup, step: int) -> None:
    """Raise `DeviceError` unless all workers hold the same weights and moments, bit for bit."""
    workers = group.gather({"host": socket.gethostname(), "digests": program.digests()})
    differences = []
    for part in workers[0]["digests"]:
        holders: dict[int, list[str]] = {}
        for rank, worker in enumerate(workers):
            holders.setdefault(worker["digests"][part], []).append(f"{rank} ({worker['host']})")
        if len(holders) > 1:
            held = [f"{digest:016x} on rank {', '.join(ranks)}" for digest, ranks in holders.items()]
            differences.append(f"  {part}: {'; '.join(held)}")
    if differences:
        raise DeviceError(
            f"after step {step} the workers' states differ, which must be equal bit for bit:\n"
            + "\n".join(differences)
            + "\nThe state was not saved; the newest checkpoint is from when they were equal. One worker's CPU or "
            "memory computes otherwise than the others': take its node out, and the same command continues."
        )


def evaluate(program: Program, validation: TokenStream) -> dict[str, float]:
    """The loss on the first validation samples; nothing when the split is smaller than a micro-batch."""
    batch = program.recipe.batch
    count = num_evaluation_batches(validation, batch, program.recipe.train.evaluation_batches)
    if count == 0:
        return {}
    loss = program.evaluate(lambda index: evaluation_batch(validation, batch, index), count)
    return program.backend.defer({"validation_loss": loss}).read()


def count_compile_misses(job: Job, backend: Backend, group: WorkerGroup) -> dict[str, Any]:
    """Graphs compiled, and files added to the published cache: the largest count of any worker."""
    return {
        "graphs_compiled": group.maximum(backend.cache_report().graphs_compiled),
        "new_cache_files": group.maximum(new_cache_files(job)),
    }
