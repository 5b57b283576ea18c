"""The training loop, as every worker runs it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.backends.torch_native import TorchNative
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.program.optimizer import learning_rate
from services.common.program.step import Program
from services.common.recipe import fingerprint
from services.common.telemetry import configure_logging
from services.trainer.checkpoint import load_checkpoint, newest_checkpoint
from services.trainer.data import micro_batches
from services.trainer.divergence import ENDED_BY, SkippedSteps, diverged
from services.trainer.job import Job
from services.trainer.metrics import StepRecord
from services.trainer.node import compile_cache_folder, new_cache_files, prepare_node
from services.trainer.recorder import Recorder
from services.trainer.stop import StopReason, StopWatch, clear_stop, stopped

logger = logging.getLogger(__name__)


def train(job: Job, environment: WorkerEnvironment) -> None:
    """Train from the newest checkpoint to `train.max_steps`.

    Returns when the run is complete. Raises `TryAgain` or `Interrupted` when it stopped early: with a
    committed checkpoint, and on all workers after the same step. Raises `RecipeError` when its numbers diverged.
    """
    recipe, rank, world_size = job.recipe, environment.rank, environment.world_size
    configure_logging("trainer", rank=rank, file=job.run_folder / "logs" / f"rank-{rank:05d}.log")
    backend = form_group(job, environment)
    backend.wait_for_work(lambda: prepare_node(job))
    require_same_program(job, backend)
    program = Program(recipe, backend)
    first_step, skipped_steps = backend.wait_for_work(lambda: resume(job, program))
    require_same_step(job, backend, first_step)
    training = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "train")
    stop_watch = StopWatch(job, environment)
    skipped = SkippedSteps(job, skipped_steps)
    setup_seconds, training_since = time.time() - job.workers_started_at.timestamp(), time.perf_counter()
    reason, done = StopReason.NONE, first_step
    divergence: StepRecord | None = None

    with Recorder(job, environment, program, first_step) as recorder:
        while done < recipe.train.max_steps and not reason and not divergence:
            step, started = done, time.perf_counter()
            tokens = list(micro_batches(training, recipe.batch, recipe.train.seed, step, rank, world_size))
            data_seconds = time.perf_counter() - started
            result = program.train_step(step, tokens, skipped.total)
            loss, gradient_norm = result.loss.item(), result.gradient_norm.item()
            is_applied = bool(result.is_applied.item())
            skipped.count(is_applied)
            step_seconds = time.perf_counter() - started

            done = step + 1
            reason = StopReason(backend.maximum_over_workers(stop_watch.look(done)))
            record = StepRecord(
                step=done,
                loss=loss,
                gradient_norm=gradient_norm,
                learning_rate=learning_rate(recipe.optimizer, step),
                step_seconds=step_seconds,
                data_seconds=data_seconds,
                skipped_steps=skipped.total,
                is_first_of_process=step == first_step,
            )
            is_saving = recorder.needs_checkpoint(done, bool(reason), is_applied)
            if skipped.are_too_many or (is_saving and not program.is_finite()):
                is_saving, divergence = False, record
            recorder.record(record, is_saving)
        recorder.finish()
        attempt = {
            "started_at": job.workers_started_at.timestamp(),
            "setup_seconds": max(0.0, setup_seconds),
            "train_seconds": time.perf_counter() - training_since,
            "first_step": first_step,
            "last_step": done,
            "workers": world_size,
            "launch": environment.launch,
            "ended_by": ENDED_BY if divergence else str(reason) if reason else "completion",
            **count_compile_misses(job, backend),
        }
        recorder.record_attempt(attempt)
    if reason and rank == 0:
        clear_stop(job.run_folder)
    backend.wait_for_all()  # a worker that ends with an error ends the group: rank 0 must have finished its duties
    backend.leave()
    if divergence:
        raise diverged(job, divergence, skipped)
    if reason and done < recipe.train.max_steps:
        raise stopped(reason, done, job.run_folder)


def form_group(job: Job, environment: WorkerEnvironment) -> TorchNative:
    """This worker's backend, connected to the others and pointed at the node's copy of the compile cache.

    The group comes before all work, for what may take long is waited for through it.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache_folder(job))
    backend = TorchNative(job.recipe.parallel.threads_per_worker)
    backend.join(environment.rank, environment.world_size)
    if job.recipe.compile.require_warm:
        backend.require_warm_cache()
    return backend


def require_same_program(job: Job, backend: TorchNative) -> None:
    """Raise `DeviceError` unless every worker's node gives the bits of the program that the command was started for.

    Replicas on unlike CPUs would drift apart, and no checkpoint would be that of the program that it names.
    """
    facts = program_facts(job.recipe)
    for rank, theirs in enumerate(backend.gather_facts(facts)):
        if theirs != facts:
            difference = explain_difference(theirs, facts, sides=(f"rank {rank}", f"rank {backend.rank}"))
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
    checkpoint = newest_checkpoint(job.checkpoint_shelf)
    if checkpoint is None:
        logger.info("starting a new run")
        return 0, 0
    load_checkpoint(checkpoint, program)
    state = checkpoint.manifest.checkpoint
    logger.info("resuming after step=%d from %s", state.step, checkpoint.path)
    return state.step, state.skipped_steps


def require_same_step(job: Job, backend: TorchNative, first_step: int) -> None:
    """Raise `ArtifactError` when workers found different checkpoints: their weights would be mixed."""
    newest, oldest = backend.maximum_over_workers(first_step), -backend.maximum_over_workers(-first_step)
    if newest != oldest:
        raise ArtifactError(
            f"{job.checkpoint_shelf}: one worker resumes after step {newest}, another after step {oldest}: not all "
            f"nodes can read the newest checkpoint. Run `python -m services.common.artifacts verify` on each of them."
        )


def count_compile_misses(job: Job, backend: TorchNative) -> dict[str, Any]:
    """Graphs compiled, and files added to the published cache: the largest count of any worker."""
    return {
        "graphs_compiled": backend.maximum_over_workers(backend.graphs_compiled),
        "new_cache_files": backend.maximum_over_workers(new_cache_files(job)),
    }
