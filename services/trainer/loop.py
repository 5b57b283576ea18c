"""The training loop that every worker runs."""

from __future__ import annotations

import gc
import time
from typing import Any

from services.common.errors import DeviceError, MillraceError, WorkersLost
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.common.process.telemetry import configure_logging
from services.common.program.optimizer import learning_rate
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.trainer.agreement import (
    AgreedStep,
    StepAgreement,
    StepOutcome,
    TakenStep,
    WorkerStep,
    require_same_outcome,
    require_same_program,
    require_same_state,
)
from services.trainer.checkpoints.loader import ResumePoint, list_checkpoints, resume, roll_back
from services.trainer.checkpoints.memory import MemoryCheckpoints
from services.trainer.checkpoints.writer import CheckpointWriter
from services.trainer.data import batch_samples, micro_batches
from services.trainer.evaluation.records import drop_evaluations_after, has_evaluation
from services.trainer.evaluation.validation import Validation
from services.trainer.health.divergence import SkippedSteps, diverged, find_faulty_worker
from services.trainer.health.loss_spikes import SpikeDetector, Verdict
from services.trainer.health.measurement import HealthMeasurement
from services.trainer.health.straggler import Stragglers
from services.trainer.health.watchdog import EVALUATION, HEALTH, Watchdog
from services.trainer.job import Job, rank_log
from services.trainer.metrics.events import Kind, record_event
from services.trainer.metrics.recorder import MetricsRecorder
from services.trainer.metrics.records import StepRecord
from services.trainer.mixture import open_mixture, open_rows
from services.trainer.runs.branch import find_starts
from services.trainer.supervision.stop import StopConditions, clear_stop, stopped
from services.trainer.workers.node_staging import new_cache_files, prepare_node
from services.trainer.workers.worker import joined_group, make_backend, prepare_device


def train(job: Job, environment: WorkerEnvironment) -> None:
    """Train from the newest checkpoint to `train.max_steps`.

    Returns when the run is complete. Raises `TryAgain` or `Interrupted` when it stopped early: with a committed
    checkpoint, and on all workers after the same step. Raises `RecipeError` when the run diverged, and `WorkersLost`
    when a worker gives inconsistent results.
    """
    configure_logging("trainer", rank=environment.rank, file=rank_log(job.run_folder, environment.rank))
    with joined_group(environment, prepare_device(job)) as group:
        group.wait_for_work(lambda: prepare_node(job))
        require_same_program(job, group)
        training = Training(job, environment, group)
        with training.recorder, training.watchdog:
            training.evaluate_start()
            while not training.is_over:
                for outcome in training.step():
                    training.follow(outcome)
            training.finish()
    if error := training.error():
        raise error


class Training:
    """Trains as one worker: holds the program, the position in the run, and the reason for the run's end.

    All workers call every method, in the same order. All steps are taken within the contexts `recorder` and `watchdog`.

    Workers agree on a step while they compute the next one, and follow what they agreed on after it. They wait for the
    agreement on a step after which something is due, such as a checkpoint: it holds what was decided until then.
    """

    _done: int
    """Optimizer steps done."""
    _skipped: SkippedSteps
    _saved_step: int
    """Step of the newest checkpoint that was saved or loaded."""

    def __init__(self, job: Job, environment: WorkerEnvironment, group: ProcessGroup) -> None:
        recipe, corpus, ancestors = job.recipe, job.corpus, job.lineage.ancestors
        self._job, self._group = job, group
        self._agreement = StepAgreement(group)
        self._unsettled: TakenStep | None = None  # the newest step, while its agreement goes on
        self._backend = make_backend(job, environment)
        self._writer = CheckpointWriter(job, self._backend.mesh, group)
        self._memory = MemoryCheckpoints(job, environment, group, self._writer)
        steps = list_checkpoints(job, group)
        self._program = Program(recipe, self._backend, draws_weights=not steps and not recipe.train.branch)
        self._spikes = SpikeDetector(recipe)
        point = resume(job, self._program, group, steps)
        self._start_at(point)
        self._first_step = self._done
        self._is_program_new = True  # its first step compiles or loads the graphs
        rows = open_rows(corpus)  # for both splits, so that the worker has one bound of maps
        self._tokens = open_mixture(corpus, "train", rows, find_starts(ancestors, recipe, corpus.content_digests))
        self._validation = Validation(recipe, corpus, recipe.train.evaluation_tokens, rows)
        self._stop_conditions = StopConditions(job, environment)
        self._stragglers, self._health = Stragglers(), HealthMeasurement(recipe)
        self._stop_reason = StopReason.NONE
        self._divergence: StepRecord | None = None
        self._fault: WorkersLost | None = None
        self._commit_seconds = 0.0  # of training that stood for commits since the newest checkpoint was saved
        self._setup_seconds = max(0.0, time.time() - job.workers_started_at.timestamp())
        self._training_since = time.perf_counter()
        self.recorder = MetricsRecorder(job, group, self._backend, self._first_step, environment.local_world_size)
        self.watchdog = Watchdog(job, group)

    @property
    def is_over(self) -> bool:
        return self._is_complete or bool(self._stop_reason or self._divergence or self._fault)

    def step(self) -> list[StepOutcome]:
        """Take an optimizer step, and return the outcomes that all workers have agreed on since the last call.

        They are that of the step before and, if something is due after it, that of this step. Where the step before
        makes the run go back, this step is left out.
        """
        outcomes, settled = list[StepOutcome](), None
        with self.watchdog.step(self._done, self._is_program_new):
            taken = self._take_step()
            if taken.record.is_first_of_process:
                self._report_cache_misses()
            if self._unsettled:
                outcomes.append(self._settle(self._unsettled, self._agreement.finish()))
                self._unsettled = None
            if not any(outcome.goes_back for outcome in outcomes):
                self._agreement.start(self._own_part(taken))
                if self._is_due(taken):
                    settled = self._agreement.finish()
                else:
                    self._unsettled = taken
        if settled:
            outcomes.append(self._settle(taken, settled))
        return outcomes

    def _take_step(self) -> TakenStep:
        recipe, step, is_first = self._job.recipe, self._done, self._is_program_new
        batch, started = self._spikes.batch_of(step), time.perf_counter()
        mesh, offset = self._backend.mesh, self._job.lineage.data_offset_samples
        batches = list(micro_batches(self._tokens, recipe, batch, mesh, offset))
        data_seconds = time.perf_counter() - started
        result = self._program.train_step(step, batches, self._skipped.total)
        # While the device computes. After a rollback the next batch is another one, which is then read when due.
        self._tokens.prefetch(batch_samples(self._tokens, recipe, self._spikes.batch_of(step + 1), mesh, offset))
        numbers = self._backend.read(result._asdict())
        is_applied = bool(numbers["is_applied"])
        self._skipped.count(is_applied)
        self._done, self._is_program_new = step + 1, False
        record = StepRecord(
            step=self._done,
            loss=numbers["loss"],
            gradient_norm=numbers["gradient_norm"],
            learning_rate=learning_rate(recipe.optimizer, step),
            step_seconds=time.perf_counter() - started,
            data_seconds=data_seconds,
            skipped_steps=self._skipped.total,
            is_first_of_process=is_first,
            time=time.time(),
        )
        return TakenStep(record, batch, batches, is_applied)

    def _report_cache_misses(self) -> None:
        """Record files that the program's first step added to the nodes' copies of the compile cache. A graph that was
        found may need its kernels compiled again. Raises `DeviceError` under `compile.require_warm`.
        """
        if self._job.cache and (files := self._group.maximum(new_cache_files(self._job))):
            self._record("cache_miss", files=files)
            if self._job.recipe.compile.require_warm:
                raise DeviceError(
                    f"{self._job.cache.path}: {files} files that it lacks were compiled, which compile.require_warm "
                    f"forbids. Train with the image, or from the path of the virtual environment, that compiled it."
                )

    def _own_part(self, taken: TakenStep) -> WorkerStep:
        """Return what this worker tells the others about a step. The outcome of the step before has to be settled."""
        record = taken.record
        numbers = self.recorder.measure(self._program, record.step_seconds, record.data_seconds)
        is_compared = not record.is_first_of_process
        return WorkerStep(
            stop_reason=self._stop_conditions.check(),
            written_step=self._writer.written_step,
            deviation=self._spikes.deviation(record.loss, record.gradient_norm),
            is_applied=taken.is_applied,
            compared_seconds=self._stragglers.add(numbers.gradient_seconds) if is_compared else 0.0,
            numbers=numbers,
        )

    def _is_due(self, taken: TakenStep) -> bool:
        """Whether anything is due after a step that needs its outcome. After the first step a stop may be."""
        return (
            taken.record.is_first_of_process
            or not taken.is_applied
            or self._is_checkpoint_due(taken)
            or self._memory.is_due(self._done)
            or self._is_evaluation_due
            or self._health.is_due(self._done)
        )

    def _settle(self, taken: TakenStep, agreed: AgreedStep) -> StepOutcome:
        """Decide what follows from a step, as all workers do. A step that was not applied is computed again."""
        record = taken.record
        require_same_outcome(agreed, taken.is_applied, self._group, record.step)
        self._stop_reason = agreed.stop_reason
        if agreed.fastest_seconds and self._group.world_size > 1:
            straggler = self._stragglers.compare(agreed.slowest_rank, agreed.slowest_seconds, agreed.fastest_seconds)
            if straggler is not None:
                self._record("straggler", step=record.step, rank=straggler, **self._stragglers.metrics)
        if record.is_first_of_process and self._job.start_number:
            seconds = max(0.0, record.time - self._job.workers_started_at.timestamp())
            self._record("restarted", step=record.step, seconds=seconds)
        if not taken.is_applied:
            with self.watchdog.phase("compute again", record.step):
                self._fault = find_faulty_worker(self._job, self._program, self._group, taken)
        verdict = self._spikes.add(record.step, record.loss, record.gradient_norm, agreed.deviation)
        # The run would end before its patience does. After a step that was applied the skipped steps are already those
        # of the next one, which a run that resumes with this step does not know.
        if verdict is Verdict.DEVIATING and not taken.is_applied and self._skipped.are_too_many:
            verdict = Verdict.SPIKE
        self._health.count(taken)
        if self._group.rank == 0:
            self._spikes.record(self._job, verdict, record.step, record.loss)
        is_spike = verdict is Verdict.SPIKE and not self._fault
        if is_spike and not self._spikes.has_rollback_left:
            self._spikes.accept()
        goes_back = is_spike and self._spikes.has_rollback_left
        return StepOutcome(taken, agreed, self._stragglers.metrics, goes_back)

    def follow(self, outcome: StepOutcome) -> None:
        """Do what an outcome asks for, and record its step."""
        if outcome.goes_back:
            self.rewind(outcome)
            return
        record = outcome.taken.record
        with self.recorder.step(record, outcome.agreed.numbers, outcome.straggler):
            with self.watchdog.phase("checkpoint", self._done):
                stalled_since = time.perf_counter()
                self._writer.advance(outcome.agreed.written_step)
                self._commit_seconds += time.perf_counter() - stalled_since
            if record.step == self._done:  # otherwise nothing was due after the step
                self.save(outcome.taken)
                self.measure_health(outcome.taken)
                self.evaluate(outcome.taken)
        if record.step == self._done:  # whose record is written: a start that resumes with this step does not write it
            self.keep(outcome.taken)

    def rewind(self, spike: StepOutcome) -> None:
        """Go back to a checkpoint before the spike, and leave out the batches from there to the last one of the spike.

        A stop that was due is found again after the next step.
        """
        record, wanted_step, self._stop_reason = spike.taken.record, self._spikes.wanted_step, StopReason.NONE
        with self.recorder.step(record, spike.agreed.numbers, spike.straggler):
            pass
        with self.watchdog.phase("rollback", self._done):
            self._writer.wait()
            self._memory.discard()
            self._group.barrier()
            point = roll_back(self._job, self._program, self._group, wanted_step)
            if not point.is_loaded:  # no checkpoint has the weights, which are drawn again
                del self._program
                gc.collect()  # the program and its compiled functions refer to each other
                self._program, self._is_program_new = Program(self._job.recipe, self._backend), True
            skipped = self._spikes.skip(max(wanted_step, point.step), spike.taken.batch)
            self._start_at(point)
            batches = {"first_batch": skipped.first, "last_batch": skipped.last}
            self._record("rollback", step=record.step, to_step=point.step, wanted_step=wanted_step, **batches)

    def save(self, step: TakenStep) -> None:
        """Start to save a checkpoint if one is due. The run ends instead where it has diverged.

        Raises what the checkpoint before failed with, and `DeviceError` where replicas of the state differ.
        """
        is_due = not self._fault and self._is_checkpoint_due(step)
        with self.watchdog.phase("checkpoint", self._done):
            stalled_since, state = time.perf_counter(), self._program.state
            is_finite = not is_due or self._backend.read({"is_finite": state.is_finite()})["is_finite"]
            if self._skipped.are_too_many or not is_finite:
                self._divergence = step.record
            elif is_due:
                self._writer.wait()
                try:
                    require_same_state(self._program, self._group, self._done)
                except DeviceError:  # the copies in memory were not compared
                    self._memory.discard()
                    raise
                self._writer.save(state, self._done, self._skipped.total, stalled_since, self._spikes.state)
                seconds = self._commit_seconds + time.perf_counter() - stalled_since
                self.recorder.add(checkpoint_stall_seconds=seconds)
                self._commit_seconds, self._saved_step = 0.0, self._done
                if self._is_evaluation_due or self._health.is_due(self._done):
                    self.recorder.hold()

    def keep(self, step: TakenStep) -> None:
        """Start to copy the state into the memory of nodes if that is due."""
        is_saved = self._saved_step == self._done
        if self.is_over or is_saved or not (self._memory.is_due(self._done) and step.is_applied):
            return
        with self.watchdog.phase("checkpoint", self._done):
            stalled_since = time.perf_counter()
            self._memory.wait()
            payload = self._writer.describe(self._done, self._skipped.total, self._spikes.state)
            self._memory.save(payload, self._writer.start_shard(self._program.state, payload))
            self._commit_seconds += time.perf_counter() - stalled_since

    def measure_health(self, step: TakenStep) -> None:
        """Record the run's health if a measurement is due; see `HealthMeasurement`."""
        if self._health.is_due(self._done) and not self._fault and not self._divergence:
            with self.watchdog.phase(HEALTH, self._done):
                self.recorder.add(**self._health.measure(self._program, step))

    def evaluate_start(self) -> None:
        """Evaluate the state that training starts from, if that is due and the run has no record of it.

        It is due at step 0, where a branch begins, and after a step whose evaluation a stop or a kill ended.
        """
        is_missing = self._group.rank == 0 and not has_evaluation(self._job.run_folder, self._done)
        if self._is_evaluation_due and self._group.maximum(is_missing):
            # A stop file that was there before, or a time limit, lets the run take its first step, so that each command
            # gets on. A signal is to this command, and its sender may not wait for a whole evaluation.
            before = min(self._group.maximum(self._stop_conditions.check()), StopReason.STOP_FILE)
            self._evaluate_until_stopped(ignored=StopReason(max(before, StopReason.TIME_LIMIT)))

    def evaluate(self, step: TakenStep) -> None:
        """Evaluate the state if that is due: after the save, which is committed meanwhile.

        A stop ends the evaluation with a checkpoint, and the next start evaluates that.
        """
        is_stopping = self._stop_reason and not self._is_complete
        if self._is_evaluation_due and not (self._fault or self._divergence or is_stopping):
            self._evaluate_until_stopped()
            if self._stop_reason and self._saved_step != self._done:
                self.save(step)

    def _evaluate_until_stopped(self, ignored: StopReason = StopReason.NONE) -> None:
        """Evaluate the state, and record it unless a stop stronger than `ignored` ends it before its last round.

        Only the last step's evaluation is not ended, because nothing would start after it.
        """

        def goes_on() -> bool:
            self._agreement.start(WorkerStep(self._stop_conditions.check(), self._writer.written_step))
            agreed = self._agreement.finish()
            self._writer.advance(agreed.written_step)
            if not self._is_complete and agreed.stop_reason > ignored:
                self._stop_reason = agreed.stop_reason
            return not self._stop_reason or self._is_complete

        with self.watchdog.phase(EVALUATION, self._done):
            if evaluation := self._validation.evaluate(self._program, goes_on):
                self.recorder.add_evaluation(self._done, self._skipped.total, evaluation)

    def finish(self) -> None:
        """Wait for the last checkpoint, and record how this start of the workers ended."""
        with self.watchdog.phase("checkpoint", self._done):
            self._writer.wait()
        if self._group.rank == 0 and self._is_complete:
            self._spikes.record_end(self._job, self._done)
        self.recorder.write_attempt(
            {
                "started_at": self._job.workers_started_at.timestamp(),
                "setup_seconds": self._setup_seconds,
                "train_seconds": time.perf_counter() - self._training_since,
                "first_step": self._first_step,
                "last_step": self._done,
                "workers": self._group.world_size,
                "launch": self._job.launch,
                "ended_by": self._describe_end(),
                "graphs_compiled": self._group.maximum(self._backend.graphs_compiled()),
                "new_cache_files": self._group.maximum(new_cache_files(self._job)),
                "slowest_checkpoint_seconds": self._writer.slowest_seconds,
            }
        )
        if self._stop_reason and not self._fault and self._group.rank == 0:  # after a fault the stop is still to come
            clear_stop(self._job.run_folder)
        self._memory.discard()

    def error(self) -> MillraceError | None:
        """Return the error with which this worker ends; None where the run is complete."""
        if self._fault:
            return self._fault
        if self._divergence:
            self._record("diverged", step=self._divergence.step, skipped=self._skipped.in_a_row)
            return diverged(self._job, self._divergence, self._skipped)
        if self._stop_reason and not self._is_complete:
            is_new = self._done == self._job.recipe.train.first_step
            committed = f"after step {self._done}; its checkpoint is committed"
            return stopped(self._stop_reason, "before the first step" if is_new else committed)
        return None

    def _start_at(self, point: ResumePoint) -> None:
        self._done = self._saved_step = point.step
        self._skipped = SkippedSteps(self._job, point.skipped_steps)
        self._spikes.go_back(point.loss_spikes)
        self._writer.resume_from(point)
        self._memory.step = point.step
        if self._group.rank == 0:
            drop_evaluations_after(self._job.run_folder, point.step)

    def _record(self, event: Kind, **facts: Any) -> None:
        """Record an event of the run, once for all workers."""
        if self._group.rank == 0:
            record_event(self._job, event, **facts)

    def _is_checkpoint_due(self, step: TakenStep) -> bool:
        """Whether a checkpoint is due: after the last step, at a stop, and when an interval is over.

        The interval does not end with a skipped step: that checkpoint would hold nothing new, and in a run that
        diverges it would replace an older, useful one.
        """
        interval = self._job.recipe.checkpoint.interval_steps
        is_interval_over = self._done // interval > self._saved_step // interval
        return self._is_complete or bool(self._stop_reason) or (is_interval_over and step.is_applied)

    @property
    def _is_complete(self) -> bool:
        return self._done >= self._job.recipe.train.max_steps

    @property
    def _is_evaluation_due(self) -> bool:
        train = self._job.recipe.train
        is_end = self._done in (train.first_step, train.max_steps)
        is_step_due = is_end or self._done % train.evaluation_interval_steps == 0
        return is_step_due and not self._validation.is_empty

    def _describe_end(self) -> str:
        if self._divergence:
            return "divergence"
        if self._fault:
            return "fault"
        return str(self._stop_reason) if self._stop_reason else "completion"
