"""What follows a step: checkpoints and evaluation when they are due, and its metrics.

Every worker takes part. Rank 0 writes for all, since all hold the same weights, and the others wait for it in a way
that may take longer than a collective. A checkpoint comes before the evaluation, so that none is lost to it.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from services.common.artifacts.token_stream import TokenStream
from services.common.errors import DeviceError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.step import Program
from services.trainer.checkpoint import CheckpointWriter
from services.trainer.data import evaluation_batch, num_evaluation_batches
from services.trainer.job import Job
from services.trainer.metrics import MetricsWriter, StepRecord


class Recorder:
    def __init__(self, job: Job, environment: WorkerEnvironment, program: Program, first_step: int) -> None:
        self._recipe, self._program, self._rank = job.recipe, program, environment.rank
        self._validation = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "validation")
        self._is_checkpoint_due = False
        self._metrics: MetricsWriter | None = None
        self._writer: CheckpointWriter | None = None
        if self._rank == 0:
            self._metrics = MetricsWriter(job.run_folder, first_step)
            self._writer = CheckpointWriter(job, environment.world_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._metrics:
            self._metrics.close()

    def needs_checkpoint(self, step: int, is_stopping: bool, is_applied: bool) -> bool:
        """Asked once after each step: is it the last one, a stop's, or an update with which the interval is over?

        The interval does not end with a skipped step. The checkpoint would hold nothing new, and in a run that diverges
        it would push out one from before.
        """
        self._is_checkpoint_due |= step % self._recipe.checkpoint.interval_steps == 0
        return step == self._recipe.train.max_steps or is_stopping or (self._is_checkpoint_due and is_applied)

    def record(self, step: StepRecord, is_saving: bool) -> None:
        """Write the step's metrics; begin a checkpoint if `is_saving`, and evaluate when it is time.

        Raises what an earlier checkpoint's background write failed with, and `DeviceError` when the workers' states
        differ: then no checkpoint is made of them.
        """
        train, batch = self._recipe.train, self._recipe.batch
        step_tokens = batch.global_batch_size * self._recipe.corpus.sequence_length
        record: dict[str, Any] = asdict(step) | {
            "time": time.time(),
            "step_tokens": step_tokens,
            "tokens": step.step * step_tokens,
            "tokens_per_second": step_tokens / step.step_seconds,
        }
        if is_saving:
            record["checkpoint_stall_seconds"] = self._save(step)
        if step.step == train.max_steps or step.step % train.evaluation_interval_steps == 0:
            if is_saving and self._metrics:
                self._metrics.hold(record)
            record |= self._evaluate()
        if self._writer:
            self._writer.raise_failure()
        if self._metrics:
            self._metrics.log(record)

    def finish(self) -> None:
        """Return once the last checkpoint is committed."""
        self._program.backend.wait_for_work(self._wait_for_writer)

    def record_attempt(self, attempt: dict[str, Any]) -> None:
        if self._metrics and self._writer:
            self._metrics.log_attempt(attempt | {"slowest_checkpoint_seconds": self._writer.slowest_seconds})

    def _save(self, step: StepRecord) -> float:
        """Begin a checkpoint; the seconds that training stood still for it."""
        started = time.perf_counter()
        self.finish()
        self._require_same_state(step.step)
        if self._writer:
            self._writer.save(self._program, step.step, step.skipped_steps, started)
        self._is_checkpoint_due = False
        return time.perf_counter() - started

    def _wait_for_writer(self) -> None:
        if self._writer:
            self._writer.wait()

    def _require_same_state(self, step: int) -> None:
        mine = {"host": socket.gethostname(), "digests": self._program.digests()}
        workers = self._program.backend.gather_facts(mine)
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

    def _evaluate(self) -> dict[str, float]:
        """The loss on the first validation samples; nothing when the split is smaller than a micro-batch."""
        batch = self._recipe.batch
        count = num_evaluation_batches(self._validation, batch, self._recipe.train.evaluation_batches)
        if count == 0:
            return {}
        loss = self._program.evaluate(lambda index: evaluation_batch(self._validation, batch, index), count)
        return {"validation_loss": loss.item()}
