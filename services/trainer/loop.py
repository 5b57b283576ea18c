"""The training loop that every worker runs."""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

from services.common.artifacts.corpus_rows import CorpusRows
from services.common.artifacts.token_stream import TokenStream
from services.common.errors import MillraceError, RecipeError
from services.common.launch.launcher import WorkerEnvironment
from services.common.process.shutdown import StopReason
from services.common.process.telemetry import configure_logging
from services.common.program.micro_batch import MicroBatch
from services.common.program.optimizer import learning_rate
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.trainer.agreement.requirements import require_same_program, require_same_state
from services.trainer.agreement.step_agreement import AgreedStep, StepAgreement, WorkerStep, require_same_outcome
from services.trainer.checkpoints.loader import (
    ResumePoint,
    begins_with_random_weights,
    list_checkpoints,
    resume,
    roll_back,
)
from services.trainer.checkpoints.writer import CheckpointSchedule, CheckpointWriter
from services.trainer.data import micro_batches, prefetch_batch
from services.trainer.evaluation.records import drop_evaluations_after, has_evaluation
from services.trainer.evaluation.validation import Validation
from services.trainer.health.divergence import ENDED_BY, SkippedSteps, diverged, find_faulty_worker
from services.trainer.health.loss_spikes import SpikeDetector, Verdict, record_changed_settings, record_rollback
from services.trainer.health.measurement import HealthMeasurement
from services.trainer.health.straggler import Stragglers
from services.trainer.health.watchdog import EVALUATION, HEALTH, Watchdog
from services.trainer.job import Job, rank_log
from services.trainer.metrics.events import record_event
from services.trainer.metrics.metric_table import ReducedNumbers
from services.trainer.metrics.recorder import MetricsRecorder
from services.trainer.metrics.records import StepRecord
from services.trainer.supervision.stop import StopConditions, clear_stop, stopped
from services.trainer.workers.node_staging import new_cache_files, prepare_node
from services.trainer.workers.worker import joined_group, make_backend, prepare_device


def train(job: Job, environment: WorkerEnvironment) -> None:
    """Train from the newest checkpoint to `train.max_steps`.

    Returns when the run is complete. Raises `TryAgain` or `Interrupted` when it stopped early: with a committed
    checkpoint, and on all workers after the same step. Raises `RecipeError` when the run diverged, and `WorkersLost`
    when a worker gives inconsistent results.
    """
    rank = environment.rank
    configure_logging("trainer", rank=rank, file=rank_log(job.run_folder, rank))
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


class TakenStep(NamedTuple):
    """A step that this worker has taken."""

    record: StepRecord
    batch: int
    """Number of the batch that the step took."""
    micro_batches: list[MicroBatch]
    """This worker's micro-batches of the batch."""
    is_applied: bool
    """Whether the step updated the weights."""


class StepOutcome(NamedTuple):
    """A step with the decisions that all workers share."""

    taken: TakenStep
    numbers: ReducedNumbers
    """Measurements of all workers."""
    straggler: dict[str, float]
    """Metrics of the newest comparison of the workers; see `Stragglers`."""
    written_step: int
    """Step of the checkpoint of which all workers have written their shards; 0 for none."""
    goes_back: bool
    """Whether a loss spike is confirmed after which the run goes back."""

    @property
    def record(self) -> StepRecord:
        return self.taken.record


class Training:
    """Trains as one worker: holds the program, the position in the run, and the reason for the run's end.

    All workers call every method, in the same order. All steps are taken within the contexts `recorder` and `watchdog`.

    Workers agree on a step while they compute the next one, and follow what they agreed on after it. They wait for the
    agreement on a step after which something is due, such as a checkpoint: it holds what was decided until then.
    """

    _done: int
    """Optimizer steps done."""
    _skipped: SkippedSteps
    _schedule: CheckpointSchedule
    _saved_step: int
    """Step of the newest checkpoint that was begun or loaded."""

    def __init__(self, job: Job, environment: WorkerEnvironment, group: ProcessGroup) -> None:
        recipe, corpus = job.recipe, job.corpus
        self._job, self._environment, self._group = job, environment, group
        self._agreement = StepAgreement(group)
        self._unsettled: TakenStep | None = None  # the newest step, while its agreement goes on
        self._backend = make_backend(job, environment)
        steps = list_checkpoints(job, group)
        is_drawn = begins_with_random_weights(job, steps)
        self._program = Program(recipe, self._backend, draws_weights=is_drawn)
        self._spikes = SpikeDetector(recipe)
        self._writer = CheckpointWriter(job, self._backend.mesh, group)
        begin = resume(job, self._program, group, steps)
        self._start_at(begin)
        if begin.recipe and group.rank == 0:
            record_changed_settings(job, begin.recipe)
        self._first_step = self._done
        self._is_program_new = True  # its first step compiles or loads the graphs
        rows = CorpusRows(corpus.path, corpus.payload)  # for both splits, so that the worker has one bound of maps
        self._tokens = TokenStream(corpus.path, corpus.payload, "train", rows)
        self._validation = Validation(recipe, corpus, recipe.train.evaluation_tokens, rows)
        self._stop_conditions = StopConditions(job, environment)
        self._stragglers, self._health = Stragglers(), HealthMeasurement(recipe)
        self._stop_reason = StopReason.NONE
        self._divergence: StepRecord | None = None
        self._fault: MillraceError | None = None
        self._commit_seconds = 0.0  # of training that stood for commits since the newest checkpoint was begun
        self._setup_seconds = max(0.0, time.time() - job.workers_started_at.timestamp())
        self._training_since = time.perf_counter()
        workers_of_node = environment.local_world_size
        self.recorder = MetricsRecorder(job, group, self._backend, self._first_step, workers_of_node)
        self.watchdog = Watchdog(job, group)

    @property
    def is_over(self) -> bool:
        return bool(
            self._done >= self._job.recipe.train.max_steps or self._stop_reason or self._divergence or self._fault
        )

    def step(self) -> list[StepOutcome]:
        """Take an optimizer step, and return the outcomes that all workers have agreed on since the last call.

        They are that of the step before and, if something is due after it, that of this step. Where the step before
        makes the run go back, this step is left out.
        """
        outcomes, settled = list[StepOutcome](), None
        with self.watchdog.step(self._done, self._is_program_new):
            taken = self._take_step()
            if self._unsettled:
                outcomes.append(self._settle(self._unsettled, self._agreement.finish()))
                self._unsettled = None
            if not any(outcome.goes_back for outcome in outcomes):
                self._agreement.begin(self._own_part(taken))
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
        offset = self._job.lineage.data_offset_samples
        batches = list(micro_batches(self._tokens, recipe, batch, self._backend.mesh, offset))
        data_seconds = time.perf_counter() - started
        result = self._program.train_step(step, batches, self._skipped.total)
        # While the device computes. After a rollback the next batch is another one, which is then read when due.
        prefetch_batch(self._tokens, recipe, self._spikes.batch_of(step + 1), self._backend.mesh, offset)
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
        """Whether anything is due after a step that needs its outcome. The first step finds a stop that was due."""
        return (
            taken.record.is_first_of_process
            or not taken.is_applied
            or self._schedule.is_due(self._done, bool(self._stop_reason), taken.is_applied)
            or self._is_evaluation_due
            or self._health.is_due(self._done)
        )

    def _settle(self, taken: TakenStep, agreed: AgreedStep) -> StepOutcome:
        """Decide what follows from a step, as all workers do. A step that was not applied is computed again."""
        record = taken.record
        require_same_outcome(agreed, taken.is_applied, self._group, record.step)
        self._stop_reason = agreed.stop_reason
        if agreed.fastest_seconds and self._group.world_size > 1:
            self._compare_speed(agreed, record.step)
        if record.is_first_of_process and self._job.start_number and self._group.rank == 0:
            seconds = max(0.0, record.time - self._job.workers_started_at.timestamp())
            record_event(self._job, "restarted", step=record.step, seconds=seconds)
        if not taken.is_applied:
            with self.watchdog.phase("compute again", record.step):
                found = (self._job, self._program, self._group, record.step, taken.batch, taken.micro_batches)
                self._fault = find_faulty_worker(*found)
        verdict = self._spikes.add(record.step, record.loss, record.gradient_norm, agreed.deviation)
        # The run would end before its patience does. After a step that was applied the skipped steps are those of the
        # step after it, by which this step must not decide: a run that begins with this step does not know them.
        if verdict is Verdict.DEVIATING and not taken.is_applied and self._skipped.are_too_many:
            verdict = Verdict.SPIKE
        self._health.count(record, taken.is_applied)
        goes_back = self._must_go_back(verdict, record)
        return StepOutcome(taken, agreed.numbers, self._stragglers.metrics, agreed.written_step, goes_back)

    def _must_go_back(self, verdict: Verdict, record: StepRecord) -> bool:
        """Return whether a loss spike is confirmed after which the run goes back, and record what the loss does."""
        if self._group.rank == 0:
            self._spikes.record(self._job, verdict, record.step, record.loss)
        if verdict is not Verdict.SPIKE or self._fault:
            return False
        if not self._spikes.has_rollback_left:
            self._spikes.accept()
            return False
        return True

    def follow(self, outcome: StepOutcome) -> None:
        """Do what an outcome asks for, and record its step."""
        if outcome.goes_back:
            self.rewind(outcome)
            return
        with self.recorder.step(outcome.record, outcome.numbers, outcome.straggler):
            self.commit(outcome.written_step)
            if outcome.record.step == self._done:  # otherwise nothing was due after the step
                self.save(outcome.taken)
                self.measure_health(outcome.taken)
                self.evaluate(outcome.taken)

    def rewind(self, spike: StepOutcome) -> None:
        """Go back to a checkpoint before the spike, and leave out the batches from there to the last one of the spike.

        A stop that was due is found again after the next step.
        """
        wanted_step, self._stop_reason = self._spikes.wanted_step, StopReason.NONE
        with self.recorder.step(spike.record, spike.numbers, spike.straggler):
            pass
        with self.watchdog.phase("rollback", self._done):
            self._writer.wait()
            self._group.barrier()
            point = roll_back(self._job, self._program, self._group, wanted_step)
            if not point.recipe:
                self._renew_program()
            skipped = self._spikes.skip(max(wanted_step, point.step), spike.taken.batch)
            self._start_at(point)
            if self._group.rank == 0:
                record_rollback(self._job, spike.record.step, wanted_step, point.step, skipped)

    def save(self, step: TakenStep) -> None:
        """Begin a checkpoint if one is due. The run ends instead where it has diverged.

        Raises what the checkpoint before failed with, and `DeviceError` where replicas of the state differ.
        """
        is_due = not self._fault and self._schedule.is_due(self._done, bool(self._stop_reason), step.is_applied)
        with self.watchdog.phase("checkpoint", self._done):
            stalled_since = time.perf_counter()
            if self._skipped.are_too_many or (is_due and not self._is_finite()):
                self._divergence = step.record
            elif is_due:
                self._writer.wait()
                require_same_state(self._program, self._group, self._done)
                state, spikes = self._program.state, self._spikes.state
                self._writer.save(state, self._done, self._skipped.total, stalled_since, spikes, self._imported)
                seconds = self._commit_seconds + time.perf_counter() - stalled_since
                self.recorder.add(checkpoint_stall_seconds=seconds)
                self._commit_seconds = 0.0
                self._schedule.saved()
                self._saved_step = self._done
                if self._is_evaluation_due or self._health.is_due(self._done):
                    self.recorder.hold()

    def measure_health(self, step: TakenStep) -> None:
        """Record the run's health if a measurement is due; see `HealthMeasurement`."""
        if self._health.is_due(self._done) and not self._fault and not self._divergence:
            with self.watchdog.phase(HEALTH, self._done):
                found = self._health.measure(self._program, step.record, step.is_applied, step.micro_batches)
            self.recorder.add(**found)

    def evaluate_start(self) -> None:
        """Evaluate the state that training starts from, if that is due and the run has no record of it.

        It is due at step 0, where a branch begins, and after a step whose evaluation a stop or a kill ended.
        """
        if not self._is_evaluation_due:
            return
        is_missing = self._group.rank == 0 and not has_evaluation(self._job.run_folder, self._done)
        if self._group.maximum(is_missing):
            # A stop file that was there before, or a time limit, lets the run take its first step, so that each command
            # gets on. A signal is to this command, and its sender may not wait for a whole evaluation.
            before = min(self._group.maximum(self._stop_conditions.check()), StopReason.STOP_FILE)
            self._evaluate_until_stopped(ignored=StopReason(max(before, StopReason.TIME_LIMIT)))

    def evaluate(self, step: TakenStep) -> None:
        """Evaluate the state if that is due: after the save, which is committed meanwhile.

        A stop ends the evaluation with a checkpoint, and the next start evaluates that.
        """
        is_last = self._done == self._job.recipe.train.max_steps
        if not self._is_evaluation_due or self._fault or self._divergence or (self._stop_reason and not is_last):
            return
        self._evaluate_until_stopped()
        if self._stop_reason and self._saved_step != self._done:
            self.save(step)

    def _evaluate_until_stopped(self, ignored: StopReason = StopReason.NONE) -> None:
        """Evaluate the state, and record it unless a stop stronger than `ignored` ends it before its last round.

        Only the last step's evaluation is not ended, because nothing would start after it.
        """
        is_last = self._done == self._job.recipe.train.max_steps

        def goes_on() -> bool:
            self._agreement.begin(WorkerStep(self._stop_conditions.check(), self._writer.written_step))
            agreed = self._agreement.finish()
            self._writer.advance(agreed.written_step)
            if not is_last and agreed.stop_reason > ignored:
                self._stop_reason = agreed.stop_reason
            return not self._stop_reason or is_last

        with self.watchdog.phase(EVALUATION, self._done):
            if evaluation := self._validation.evaluate(self._program, goes_on):
                self.recorder.add_evaluation(self._done, evaluation)

    def commit(self, written_step: int) -> None:
        """Commit the checkpoint that is being written once all workers have written their shards of it."""
        with self.watchdog.phase("checkpoint", self._done):
            stalled_since = time.perf_counter()
            self._writer.advance(written_step)
            self._commit_seconds += time.perf_counter() - stalled_since

    def finish(self) -> None:
        """Wait for the last checkpoint, and record how this start of the workers ended."""
        with self.watchdog.phase("checkpoint", self._done):
            self._writer.wait()
        if self._group.rank == 0 and self._done >= self._job.recipe.train.max_steps:
            self._spikes.record_end(self._job, self._done)
        self.recorder.write_attempt(
            {
                "started_at": self._job.workers_started_at.timestamp(),
                "setup_seconds": self._setup_seconds,
                "train_seconds": time.perf_counter() - self._training_since,
                "first_step": self._first_step,
                "last_step": self._done,
                "workers": self._environment.world_size,
                "launch": self._job.launch,
                "ended_by": self._describe_end(),
                "graphs_compiled": self._group.maximum(self._backend.graphs_compiled()),
                "new_cache_files": self._group.maximum(new_cache_files(self._job)),
                "slowest_checkpoint_seconds": self._writer.slowest_seconds,
            }
        )
        if self._stop_reason and not self._fault and self._group.rank == 0:  # after a fault the stop is still to come
            clear_stop(self._job.run_folder)

    def error(self) -> MillraceError | None:
        """Return the error with which this worker ends; None where the run is complete."""
        if self._fault:
            return self._fault
        if self._divergence:
            if self._group.rank == 0:
                record_event(self._job, "diverged", step=self._divergence.step, skipped=self._skipped.in_a_row)
            return diverged(self._job, self._divergence, self._skipped)
        if self._stop_reason and self._done < self._job.recipe.train.max_steps:
            is_new = self._done == self._job.recipe.train.first_step
            return stopped(self._stop_reason, None if is_new else self._done)
        return None

    def _start_at(self, point: ResumePoint) -> None:
        self._done = point.step
        self._skipped = SkippedSteps(self._job, point.skipped_steps)
        self._schedule, self._saved_step = CheckpointSchedule(self._job.recipe), point.step
        self._spikes.go_back(point.loss_spikes)
        self._imported = point.imported
        self._writer.learn(intact_step=point.step, damaged_steps=point.damaged_steps)
        if self._group.rank == 0:
            drop_evaluations_after(self._job.run_folder, point.step)

    def _renew_program(self) -> None:
        """Initialize the weights again, where no checkpoint has them."""
        del self._program
        gc.collect()  # the program and its compiled functions refer to each other
        self._program, self._is_program_new = Program(self._job.recipe, self._backend), True

    def _compare_speed(self, agreed: AgreedStep, step: int) -> None:
        compared = (agreed.slowest_rank, agreed.slowest_seconds, agreed.fastest_seconds)
        slowest = self._stragglers.compare(*compared)
        if slowest is not None and self._group.rank == 0:
            record_event(self._job, "straggler", step=step, rank=slowest, **self._stragglers.metrics)

    @property
    def _is_evaluation_due(self) -> bool:
        train = self._job.recipe.train
        is_end = self._done in (train.first_step, train.max_steps)
        is_step_due = is_end or self._done % train.evaluation_interval_steps == 0
        return is_step_due and not self._validation.is_empty

    def _is_finite(self) -> bool:
        """See `ShardedState.is_finite`; waits for the device."""
        return bool(self._backend.read({"is_finite": self._program.state.is_finite()})["is_finite"])

    def _describe_end(self) -> str:
        if self._divergence or isinstance(self._fault, RecipeError):
            return ENDED_BY
        if self._fault:
            return "fault"
        return str(self._stop_reason) if self._stop_reason else "completion"
