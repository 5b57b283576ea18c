"""What rank 0 does besides training: metrics, evaluation and checkpoints, each when it is due."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from services.common.artifacts.token_stream import TokenStream
from services.common.program.step import Program
from services.trainer.checkpoint import CheckpointWriter
from services.trainer.data import evaluation_batches
from services.trainer.job import Job
from services.trainer.metrics import MetricsWriter, StepRecord


class Recorder:
    """Every worker of a data-parallel group holds the same weights, so one of them writes for all."""

    def __init__(self, job: Job, world_size: int, first_step: int) -> None:
        self._recipe = job.recipe
        self._validation = TokenStream(job.corpus.path, job.corpus.manifest.corpus, "validation")
        self._metrics = MetricsWriter(job.run_folder, first_step)
        self._writer = CheckpointWriter(job, world_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._metrics.close()

    def record(self, step: StepRecord, program: Program, is_stopping: bool) -> None:
        """Write the step's metrics; evaluate, and start a checkpoint, when it is time or the last chance.

        Raises what an earlier checkpoint's background write failed with.
        """
        train, batch = self._recipe.train, self._recipe.batch
        is_last = step.step == train.max_steps
        step_tokens = batch.global_batch_size * self._recipe.corpus.sequence_length
        record: dict[str, Any] = asdict(step) | {
            "time": time.time(),
            "step_tokens": step_tokens,
            "tokens": step.step * step_tokens,
            "tokens_per_second": step_tokens / step.step_seconds,
        }
        if is_last or step.step % train.evaluation_interval_steps == 0:
            record |= self._evaluate(program)
        if is_last or is_stopping or step.step % self._recipe.checkpoint.interval_steps == 0:
            record["checkpoint_stall_seconds"] = self._writer.save(program, step.step, step.skipped_steps)
        self._writer.raise_failure()
        self._metrics.log(record)

    def finish(self) -> None:
        """Return once the last checkpoint is committed."""
        self._writer.wait()

    def record_attempt(self, attempt: dict[str, Any]) -> None:
        self._metrics.log_attempt(attempt | {"slowest_checkpoint_seconds": self._writer.slowest_seconds})

    def _evaluate(self, program: Program) -> dict[str, float]:
        """The loss on the first validation samples; nothing when the split is smaller than a micro-batch."""
        batches = list(evaluation_batches(self._validation, self._recipe.batch, self._recipe.train.evaluation_batches))
        return {"validation_loss": program.evaluate(batches).item()} if batches else {}
