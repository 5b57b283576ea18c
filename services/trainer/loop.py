"""The training loop, as every worker runs it."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from services.common.artifacts.checkpoint import LossSpikes, checkpoint_id
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import ArtifactError, DeviceError, MillraceError, RecipeError, UnreadableError, WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.telemetry import configure_logging
from services.common.program.backends.choice import choose_backend
from services.common.program.backends.protocol import Backend
from services.common.program.fingerprint import explain_difference, program_facts
from services.common.program.llama import parameter_shapes
from services.common.program.mesh import make_mesh
from services.common.program.optimizer import learning_rate
from services.common.program.process_group import ProcessGroup
from services.common.program.state import StateSlice
from services.common.program.step import Program
from services.common.recipe.schema import fingerprint
from services.trainer.checkpoints.lookup import (
    all_damaged,
    checkpoint_steps,
    open_checkpoint,
    require_of_run,
    verify_sizes,
)
from services.trainer.checkpoints.shards import ShardReader
from services.trainer.checkpoints.writer import CheckpointSchedule, CheckpointWriter
from services.trainer.data import evaluation_batch, micro_batches, num_evaluation_batches
from services.trainer.health.divergence import ENDED_BY, SkippedSteps, diverged, find_faulty_worker
from services.trainer.health.loss_spikes import SpikeDetector, spiked_for_ever
from services.trainer.health.straggler import Stragglers
from services.trainer.health.watchdog import Watchdog
from services.trainer.job import Job
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import WorkerNumbers
from services.trainer.metrics.recorder import MetricsRecorder
from services.trainer.metrics.records import StepRecord
from services.trainer.node_staging import compile_cache_folder, new_cache_files, prepare_node, verify_on_node
from services.trainer.stop import StopConditions, StopReason, clear_stop, stopped

logger = logging.getLogger(__name__)


def train(job: Job, environment: WorkerEnvironment) -> None:
    """Train from the newest checkpoint to `train.max_steps`.

    Returns when the run is complete. Raises `TryAgain` or `Interrupted` when it stopped early: with a
    committed checkpoint, and on all workers after the same step. Raises `RecipeError` when its numbers diverged, and
    `WorkersLost` when a worker computes otherwise at times.
    """
    recipe, rank = job.recipe, environment.rank
    configure_logging("trainer", rank=rank, file=job.run_folder / "logs" / f"rank-{rank:05d}.log")
    # The group comes before all work: what may take long is waited for through it.
    group = ProcessGroup.join(rank, environment.world_size, environment.rendezvous)
    group.wait_for_work(lambda: prepare_node(job))
    require_same_program(job, group)
    backend = make_backend(job, environment)
    program = Program(recipe, backend)
    state = resume(job, program, group)
    first_step = fresh_step = state.step  # the first one after a program was made compiles or loads its graphs
    training = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "train")
    validation = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "validation")
    stop_conditions = StopConditions(job, environment)
    skipped, spikes = SkippedSteps(job, state.skipped_steps), SpikeDetector(recipe.train, state.loss_spikes)
    stragglers = Stragglers()
    schedule = CheckpointSchedule(recipe)
    writer = CheckpointWriter(job, backend.mesh, group)
    setup_seconds, training_since = time.time() - job.workers_started_at.timestamp(), time.perf_counter()
    reason, done = StopReason.NONE, first_step
    divergence: StepRecord | None = None
    fault: MillraceError | None = None

    with MetricsRecorder(job, group, backend, first_step) as recorder, Watchdog(job, group) as watchdog:
        while done < recipe.train.max_steps and not reason and not divergence and not fault:
            watchdog.begin_step(done, is_limited=done != fresh_step)
            step, batch, started = done, spikes.batch_of(done), time.perf_counter()
            batches = list(micro_batches(training, recipe, batch, backend.mesh))
            data_seconds = time.perf_counter() - started
            result = backend.defer(program.train_step(step, batches, skipped.total)._asdict()).read()
            is_applied = bool(result["is_applied"])
            skipped.count(is_applied)
            step_seconds = time.perf_counter() - started

            done = step + 1
            own = (stop_conditions.check(done), is_applied and result["loss"] > spikes.limit(), is_applied)
            agreed = group.gather_numbers([*own, *recorder.measure(program, step_seconds, data_seconds)])
            workers = [WorkerNumbers(*numbers[len(own) :]) for numbers in agreed]
            is_spike = any(numbers[1] for numbers in agreed)
            # A stop is found again after the next step.
            reason = StopReason.NONE if is_spike else StopReason(int(max(numbers[0] for numbers in agreed)))
            require_same_outcome([bool(numbers[2]) for numbers in agreed], done)
            if step != fresh_step:
                slow = stragglers.add([worker.gradient_seconds for worker in workers])
                if slow is not None and rank == 0:
                    record_event(job, "straggler", step=done, rank=slow, **stragglers.metrics)
            watchdog.end_step(step_seconds, is_first=step == fresh_step)
            record = StepRecord(
                step=done,
                loss=result["loss"],
                gradient_norm=result["gradient_norm"],
                learning_rate=learning_rate(recipe.optimizer, step),
                step_seconds=step_seconds,
                data_seconds=data_seconds,
                skipped_steps=skipped.total,
                is_first_of_process=step == fresh_step,
            )
            if not is_applied:
                watchdog.begin("compute again", step)
                fault = find_faulty_worker(job, program, group, done, batch, batches)
            if is_spike:
                recorder.begin(record, workers)
                recorder.write()
                watchdog.begin("rollback", step)
                fault = skip_batch(job, group, writer, spikes, record, batch)
                if fault is None:
                    fresh_step = -1
                    if not checkpoint_steps(job.checkpoint_collection):
                        del program
                        gc.collect()  # its compiled functions and itself hold each other
                        program, fresh_step = Program(recipe, backend), 0
                    state = roll_back(job, program, group, done)
                    spikes.go_back(state.loss_spikes)
                    skipped, schedule = SkippedSteps(job, state.skipped_steps), CheckpointSchedule(recipe)
                    done = state.step
                continue
            if is_applied:
                spikes.add(result["loss"])
            is_saving = not fault and schedule.is_due(done, bool(reason), is_applied)
            watchdog.begin("checkpoint", done)
            if skipped.are_too_many or (is_saving and not is_finite(program)):
                is_saving, divergence = False, record
            recorder.begin(record, workers)
            if is_saving:
                recorder.add(checkpoint_stall_seconds=save(program, group, writer, record, spikes.state))
                schedule.saved()
            if done == recipe.train.max_steps or done % recipe.train.evaluation_interval_steps == 0:
                # After the save, so that no checkpoint is lost to it.
                if is_saving:
                    recorder.hold()
                watchdog.begin("evaluation", done)
                recorder.add(**evaluate(program, validation))
                watchdog.begin("checkpoint", done)
            writer.advance()
            recorder.add(**stragglers.metrics)
            recorder.write()
        writer.wait()
        attempt = {
            "started_at": job.workers_started_at.timestamp(),
            "setup_seconds": max(0.0, setup_seconds),
            "train_seconds": time.perf_counter() - training_since,
            "first_step": first_step,
            "last_step": done,
            "workers": environment.world_size,
            "launch": environment.launch,
            "ended_by": describe_end(reason, divergence is not None, fault),
            **count_compile_misses(job, backend, group),
            "slowest_checkpoint_seconds": writer.slowest_seconds,
        }
        recorder.write_attempt(attempt)
    if reason and not fault and rank == 0:  # after a fault the stop is still to come
        clear_stop(job.run_folder)
    group.barrier()  # a worker that ends with an error ends the group: rank 0 must have finished its duties
    group.leave()
    if fault:
        raise fault
    if divergence:
        raise diverged(job, divergence, skipped)
    if reason and done < recipe.train.max_steps:
        raise stopped(reason, done, job.run_folder)


def make_backend(job: Job, environment: WorkerEnvironment) -> Backend:
    """This worker's device, pointed at the node's copy of the compile cache."""
    backend_class = choose_backend(job.recipe.parallel.device)
    os.environ.update(backend_class.cache_environment(compile_cache_folder(job), job.recipe))
    recipe, parallel = job.recipe, job.recipe.parallel
    mesh = make_mesh(recipe, environment.rank, environment.world_size)
    settings = (parallel.threads_per_worker, recipe.train.reduction, parallel.device, environment.local_rank)
    backend = backend_class(mesh, *settings)
    if recipe.compile.require_warm:
        backend.require_warm_cache()
    return backend


def require_same_program(job: Job, group: ProcessGroup) -> None:
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


class Resumed(NamedTuple):
    """What a run continues with besides its weights and moments."""

    step: int = 0
    skipped_steps: int = 0
    loss_spikes: LossSpikes | None = None


def resume(job: Job, program: Program, group: ProcessGroup) -> Resumed:
    """Load the newest checkpoint of which every worker's part verifies; nothing for a new run.

    Raises `ArtifactError` when all checkpoints are damaged, or when the workers see different ones.
    """
    damages: list[str] = []
    for step in reversed(agree_on_checkpoints(job, group)):
        with program.state.writing() as held:
            found = group.wait_for_work(partial(load_part, job, held, step))
        problems = [problem for each in group.gather({"problem": found}) if (problem := each["problem"])]
        if not problems:
            state = open_checkpoint(job.checkpoint_collection, step, verify_sizes).manifest.checkpoint
            logger.info("resuming after step=%d from %s", step, job.checkpoint_address(step).path)
            if damages and group.rank == 0:
                record_event(job, "fallback", to_step=step, damages=damages)
            return Resumed(step, state.skipped_steps, state.loss_spikes)
        logger.warning("passing over a damaged checkpoint: %s", problems[0])
        damages.append(f"{checkpoint_id(step)}: {problems[0]}")
    if damages:
        raise all_damaged(job.checkpoint_collection, damages)
    logger.info("starting a new run")
    return Resumed()


def require_same_outcome(are_applied: list[bool], step: int) -> None:
    """Raise `WorkersLost` where workers differ in whether a step updated anything, which all compute from one norm."""
    if len(set(are_applied)) > 1:
        fewer = min((True, False), key=are_applied.count)
        ranks = ", ".join(str(rank) for rank, is_applied in enumerate(are_applied) if is_applied == fewer)
        raise WorkersLost(
            f"after step {step} the workers differ in whether its gradient was finite, and all have the same one: rank "
            f"{ranks} {'applied' if fewer else 'skipped'} it alone. Where this comes again from one node, take it out; "
            f"the same command continues."
        )


def describe_end(reason: StopReason, has_diverged: bool, fault: MillraceError | None) -> str:
    """How an attempt ended, for its record."""
    if has_diverged or isinstance(fault, RecipeError):
        return ENDED_BY
    if fault:
        return "fault"
    return str(reason) if reason else "completion"


def skip_batch(
    job: Job, group: ProcessGroup, writer: CheckpointWriter, spikes: SpikeDetector, record: StepRecord, batch: int
) -> MillraceError | None:
    """Leave out the batch on which the loss spiked, with what is being written committed; an error where that is of no
    use.
    """
    limit = spikes.limit()
    if group.rank == 0:
        record_event(job, "loss_spike", step=record.step, batch=batch, loss=record.loss, limit=limit)
    writer.wait()
    group.barrier()
    return None if spikes.skip_batch(batch) else spiked_for_ever(job, record.step, record.loss, limit)


def roll_back(job: Job, program: Program, group: ProcessGroup, step: int) -> Resumed:
    """Load the newest checkpoint, in the middle of a run."""
    state = resume(job, program, group)
    if group.rank == 0:
        record_event(job, "rollback", step=step, to_step=state.step)
    return state


def agree_on_checkpoints(job: Job, group: ProcessGroup) -> list[int]:
    """Steps of the checkpoints, ascending. Raises `ArtifactError` when the workers see different ones."""
    seen = group.gather({"steps": checkpoint_steps(job.checkpoint_collection)})
    for rank, theirs in enumerate(seen):
        if theirs != seen[0]:
            one, other = (max(each["steps"], default=0) for each in (seen[0], theirs))
            raise ArtifactError(
                f"{job.checkpoint_collection}: rank 0 sees {len(seen[0]['steps'])} checkpoints, the newest after step "
                f"{one}, rank {rank} sees {len(theirs['steps'])}, the newest after step {other}: their nodes do not "
                f"have the same folder. Run `python -m services.common.artifacts list` on each of them."
            )
    return list(seen[0]["steps"])


def load_part(job: Job, held: dict[StateSlice, Tensor], step: int) -> str:
    """Load what this worker holds of a checkpoint into `held`, verified; what is wrong with it, or nothing."""
    try:
        checkpoint = open_checkpoint(job.checkpoint_collection, step, verify_sizes)
        require_of_run(checkpoint, job.recipe, job.corpus)
        reader = ShardReader(checkpoint, parameter_shapes(job.recipe.model))
        files = reader.files_of(held)
        logger.info("reading %d of %d shards of %s", len(files), len(checkpoint.manifest.files), checkpoint.path)
        verify_on_node(job, checkpoint, files)
        reader.read(held)
    except UnreadableError:
        raise
    except ArtifactError as error:
        return str(error)
    return ""


def is_finite(program: Program) -> bool:
    """See `ShardedState.is_finite`; waits for the device."""
    return bool(program.backend.defer({"is_finite": program.state.is_finite()}).read()["is_finite"])


def save(
    program: Program, group: ProcessGroup, writer: CheckpointWriter, record: StepRecord, loss_spikes: LossSpikes | None
) -> float:
    """Begin a checkpoint of the state after a step; the seconds that training stood still for it.

    Raises what the checkpoint before it failed with, and `DeviceError` when the states of workers differ that hold the
    same: then none is made of them.
    """
    started = time.perf_counter()
    writer.wait()
    require_same_state(program, group, record.step)
    writer.save(program.state.begin_snapshot, record.step, record.skipped_steps, started, loss_spikes)
    return time.perf_counter() - started


def require_same_state(program: Program, group: ProcessGroup, step: int) -> None:
    """Raise `DeviceError` unless all workers with the same part of the model hold the same bits of it.

    It reads the whole state, and from a GPU to the host; where no two workers have the same part it reads nothing.
    """
    if program.backend.mesh.data_parallel_size == 1:
        return
    part = program.backend.mesh.index("tensor")
    workers = group.gather({"host": socket.gethostname(), "part": part, "digests": program.state.digests()})
    holders: dict[tuple[int, str], dict[int, list[str]]] = {}
    for rank, worker in enumerate(workers):
        for what, digest in worker["digests"].items():
            found = holders.setdefault((worker["part"], what), {})
            found.setdefault(digest, []).append(f"{rank} ({worker['host']})")
    differences = []
    for (_, what), found in holders.items():
        if len(found) > 1:
            held = [f"{digest:016x} on rank {', '.join(ranks)}" for digest, ranks in found.items()]
            differences.append(f"  {what}: {'; '.join(held)}")
    if differences:
        raise DeviceError(
            f"after step {step} the workers' states differ, which must be equal bit for bit:\n"
            + "\n".join(differences)
            + "\nThe state was not saved; the newest checkpoint is from when they were equal. One worker's CPU or "
            "memory computes otherwise than the others': take its node out, and the same command continues."
        )


def evaluate(program: Program, validation: TokenStream) -> dict[str, float]:
    """The loss on the first validation samples; nothing when the split is smaller than a micro-batch."""
    recipe = program.recipe
    count = num_evaluation_batches(validation, recipe.batch, recipe.train.evaluation_batches)
    if count == 0:
        return {}
    loss = program.evaluate(lambda index: evaluation_batch(validation, recipe, index), count)
    return program.backend.defer({"validation_loss": loss}).read()


def count_compile_misses(job: Job, backend: Backend, group: ProcessGroup) -> dict[str, Any]:
    """Graphs compiled, and files added to the published cache: the largest count of any worker."""
    return {
        "graphs_compiled": group.maximum(backend.cache_report().graphs_compiled),
        "new_cache_files": group.maximum(new_cache_files(job)),
    }
