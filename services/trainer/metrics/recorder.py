"""Measures each step and each start of the workers, and writes their records. Rank 0 writes them."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from services.common.hardware.gpus import sum_peaks
from services.common.process.telemetry import JsonLines
from services.common.program.backends.backend import Backend
from services.common.program.process_group import ProcessGroup
from services.common.program.step import Program
from services.common.recipe.derived import causal_flops_per_token, instance_type, palm_flops_per_token, tokens_per_step
from services.common.recipe.schema import Recipe
from services.trainer.evaluation.losses import Evaluation
from services.trainer.evaluation.records import describe_record, metrics_of, write_evaluation
from services.trainer.inspection.gemm_peak import measure_gemm_peak
from services.trainer.job import Job, tokens_after
from services.trainer.metrics.commands import read_commands
from services.trainer.metrics.metric_table import ReducedNumbers, WorkerNumbers, known_metrics
from services.trainer.metrics.records import (
    ATTEMPTS_FILE,
    METRICS_FILE,
    STEP_FIELDS,
    StepRecord,
    read_last_step,
    read_lines,
    read_record_of,
)

logger = logging.getLogger(__name__)

HELD_FILE = "metrics.held.jsonl"

PEAK_SECONDS = 0.05
"""Seconds for which each worker measures its peak: enough for two or three products, and too short to notice."""
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class MetricsRecorder:
    """Records metrics; only rank 0 writes. All workers construct it together: they count the GPUs of all."""

    def __init__(
        self, job: Job, group: ProcessGroup, backend: Backend, first_step: int, workers_of_node: int = 1
    ) -> None:
        self._job, self._backend, self._group, self._workers_of_node = job, backend, group, workers_of_node
        self._step_tokens = tokens_per_step(job.recipe)
        per_token = {"mfu": palm_flops_per_token(job.recipe), "mfu_causal": causal_flops_per_token(job.recipe)}
        self._step_flops = {name: flops * self._step_tokens for name, flops in per_token.items()}
        self._is_cuda = backend.device.type == "cuda"
        gpus = group.gather(torch.cuda.get_device_name(backend.device) if self._is_cuda else "")
        self._peak = published_peak(job.recipe, gpus) or math.nan
        self._counted_steps, self._counted_seconds = 0, 0.0
        self._record: dict[str, Any] = {}
        self._writer = MetricsWriter(job.run_folder, first_step) if group.rank == 0 else None
        self._run = _RunTime(job, first_step) if group.rank == 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer:
            self._writer.close()

    def measure(self, program: Program, step_seconds: float, data_seconds: float) -> WorkerNumbers:
        """Measure the step that this worker has just done."""
        return WorkerNumbers(
            gradient_seconds=data_seconds + program.gradient_seconds,
            step_seconds=step_seconds,
            data_seconds=data_seconds,
            loss_max=program.largest_loss(),
            graphs_compiled=self._backend.graphs_compiled(),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES,
            peak_device_bytes=torch.cuda.max_memory_allocated(self._backend.device) if self._is_cuda else math.nan,
        )

    @contextmanager
    def step(self, step: StepRecord, numbers: ReducedNumbers, straggler: Mapping[str, float]) -> Iterator[None]:
        """Write the record of a step at the end of the block, in which `add` completes it; not after an error.

        After the first step all workers measure the speed of their cores together.
        """
        if self._run:
            self._record = {
                **asdict(step),
                **numbers.fields,
                "step_tokens": self._step_tokens,
                "tokens": tokens_after(self._job.recipe, self._job.lineage.parent, step.step, step.skipped_steps),
                "tokens_per_second": self._step_tokens / numbers.largest.step_seconds,
                **self._run.add(step, numbers.largest.step_seconds),
            }
        if not step.is_first_of_process:
            self._add_mean_speed(numbers.largest.step_seconds)
        self.add(**straggler)
        yield
        if self._writer:
            self._writer.log(self._record)
        if math.isnan(self._peak) and self._backend.device.type == "cpu":
            self._group.barrier()  # a core's threads share it
            self._peak = sum(self._group.gather(self._measure_peak()))

    def _add_mean_speed(self, seconds: float) -> None:
        self._counted_steps, self._counted_seconds = self._counted_steps + 1, self._counted_seconds + seconds
        self.add(mean_tokens_per_second=self._counted_steps * self._step_tokens / self._counted_seconds)
        if not math.isnan(self._peak):
            self.add(**{name: flops / seconds / self._peak for name, flops in self._step_flops.items()})

    def add(self, **values: float | dict[str, float]) -> None:
        """Add to the step's record."""
        self._record |= values

    def add_evaluation(self, step: int, skipped_steps: int, evaluation: Evaluation) -> None:
        """Write the record of the evaluation after `step` steps. The record of that step gets its numbers, too, if this
        is called in the step's block; otherwise TensorBoard gets them alone.
        """
        values = metrics_of(evaluation)
        self.add(**values)
        if not self._writer:
            return
        job = self._job
        trained_tokens = tokens_after(job.recipe, job.lineage.parent, step, skipped_steps)
        record = write_evaluation(job.run_folder, step, trained_tokens, job.corpus.id, evaluation)
        logger.info(describe_record(record, job.started_at.timestamp()))
        if self._record.get("step") != step:
            self._writer.show(step, values)
        elif self._writer.is_holding:
            self.hold()

    def hold(self) -> None:
        """Keep the record so far: a kill before the block's end must not lose it where a checkpoint has the step."""
        if self._writer:
            self._writer.hold(self._record)

    def write_attempt(self, attempt: dict[str, Any]) -> None:
        """Write how this start of the workers ended, with its compile misses. A killed start leaves no record."""
        if self._writer:
            attempts = JsonLines(self._job.run_folder / ATTEMPTS_FILE)
            attempts.append(attempt)
            attempts.close()

    def _measure_peak(self) -> float:
        """Measure this worker's share of its machine's peak in FLOP/s.

        Workers with more threads than the machine has cores take turns, so the fastest product is one that no other
        worker interrupted. All workers together then count as the machine's cores.
        """
        threads = self._job.recipe.parallel.threads_per_worker
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = min(1.0, cores / (self._workers_of_node * threads))
        return share * measure_gemm_peak(self._job.recipe.train.dtype, threads, PEAK_SECONDS)


class MetricsWriter:
    """Appends to `metrics.jsonl` and `tensorboard/` of a run. Raises `OSError` if a JSON line cannot be written.

    A killed process leaves at most a torn last line, which the next writer drops.
    """

    def __init__(self, run_folder: Path, first_step: int) -> None:
        """Take over the record that a killed process held, unless its step was written or will be done again."""
        from services.trainer.metrics.tensorboard import TensorBoard  # noqa: PLC0415 - 0.1 s, for rank 0 alone

        self._held_file = run_folder / HELD_FILE
        self._lines, self._board = JsonLines(run_folder / METRICS_FILE), TensorBoard(run_folder / "tensorboard")
        self.is_holding = False
        """Whether a record is held."""
        last = read_last_step(run_folder)
        for record in read_lines(self._held_file, STEP_FIELDS):
            if (last["step"] if last else 0) < record["step"] <= first_step:
                self._lines.append(record)
        self._held_file.unlink(missing_ok=True)

    def hold(self, record: Mapping[str, Any]) -> None:
        """Keep a record whose step may be committed before `log`, so that a kill does not lose the record."""
        partial = self._held_file.with_suffix(".partial")
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(self._held_file)
        self.is_holding = True

    def log(self, record: dict[str, Any]) -> None:
        """Write the record of one step."""
        self._lines.append(record)
        if self.is_holding:
            self._held_file.unlink()
            self.is_holding = False
        self.show(record["step"], record)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Write metrics of a step to TensorBoard alone."""
        self._board.add(step, {name: value for name, value in known_metrics(values).items() if name != "step"})

    def close(self) -> None:
        self._lines.close()
        self._board.close()


class _RunTime:
    """Computes goodput and lost time over all starts of a run, from the records of earlier starts.

    It reads one record a start, and one line for each command that trained the run.
    """

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._before = job, read_last_step(job.run_folder)
        before = self._before or {}
        names = ("productive_seconds", "redone_seconds", "restart_seconds")
        self._seconds = {name: before.get(name, 0.0) for name in names}
        self._restarts = before.get("restarts", 0) + 1 if before else 0
        self._started_at = before.get("run_started_at") or job.started_at.timestamp()
        self._step, self._skipped_steps = 0, 0
        self._go_back(first_step)

    def add(self, step: StepRecord, seconds: float) -> dict[str, float]:
        """Add a step and return its fields about the run.

        Productive are all steps except those that are done again later, those that updated nothing, and the first of a
        process, which loads or compiles its graphs. Lost are the steps that are done again, `redone_seconds`, and
        `restart_seconds`: the time of the commands between the last step before a start and its first step.
        """
        if self._before:
            self._seconds["restart_seconds"] += self._held_seconds(self._before["time"], step.time)
            self._before = None
        if step.step != self._step + 1:
            self._go_back(step.step - 1)
        if step.skipped_steps == self._skipped_steps and not step.is_first_of_process:
            self._seconds["productive_seconds"] += seconds
        self._step, self._skipped_steps = step.step, step.skipped_steps
        elapsed = step.time - self._started_at
        return {
            "goodput": min(1.0, self._seconds["productive_seconds"] / elapsed) if elapsed > 0 else 0.0,
            "restarts": self._restarts,
            **self._seconds,
            "run_started_at": self._started_at,
        }

    def _go_back(self, step: int) -> None:
        """Continue from the record of the step whose checkpoint was loaded."""
        record = (read_record_of(self._job.run_folder, step) or {}) if step else {}
        self._step, self._skipped_steps = step, record.get("skipped_steps", 0)
        productive_seconds = record.get("productive_seconds", 0.0)
        self._seconds["redone_seconds"] += max(0.0, self._seconds["productive_seconds"] - productive_seconds)
        self._seconds["productive_seconds"] = productive_seconds

    def _held_seconds(self, since: float, now: float) -> float:
        """Return the seconds from `since` to `now` for which commands held the nodes of the run."""
        earlier = [each for each in read_commands(self._job.run_folder) if each.attempt != self._job.attempt]
        lives = [(each.began_at, each.ended_at or each.seen_at) for each in earlier]
        lives.append((self._job.started_at.timestamp(), now))
        return math.fsum(max(0.0, end - max(start, since)) for start, end in lives)


def published_peak(recipe: Recipe, gpus: Sequence[str]) -> float | None:
    """Return the dense bfloat16 peak of all workers' devices in FLOP/s, by the instance type or the names of GPUs.

    Returns None on CPUs, and if neither is known.
    """
    if recipe.parallel.device == "cpu":
        return None
    node = instance_type(recipe)
    return len(gpus) * node.worker_peak_flops_per_second if node else sum_peaks(gpus)
