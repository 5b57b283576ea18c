"""The metrics of a run, as they come about: of each step and of each start of the workers. Rank 0 writes them."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from services.trainer.job import Job
from services.trainer.metrics import MetricsWriter, StepRecord


class MetricsRecorder:
    """Every worker has one, and those of other ranks than 0 write nothing."""

    def __init__(self, job: Job, rank: int, first_step: int) -> None:
        self._step_tokens = job.recipe.batch.global_batch_size * job.recipe.corpus.sequence_length
        self._record: dict[str, Any] = {}
        self._writer = MetricsWriter(job.run_folder, first_step) if rank == 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()

    def begin(self, step: StepRecord) -> None:
        """Begin the record of a step with what the loop knows of it."""
        self._record = asdict(step) | {
            "time": time.time(),
            "step_tokens": self._step_tokens,
            "tokens": step.step * self._step_tokens,
            "tokens_per_second": self._step_tokens / step.step_seconds,
        }

    def add(self, **values: float) -> None:
        """Add to the step's record."""
        self._record |= values

    def hold(self) -> None:
        """Keep the record so far: a kill before `write` must not lose that of a step whose checkpoint is committed."""
        if self._writer:
            self._writer.hold(self._record)

    def write(self) -> None:
        """Write the step's record."""
        if self._writer:
            self._writer.log(self._record)

    def write_attempt(self, attempt: dict[str, Any]) -> None:
        """Write how this start of the workers ended."""
        if self._writer:
            self._writer.log_attempt(attempt)
