"""Reads the JSON lines of a run's steps and starts, from which every view of the run is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from services.common.launch.launcher import TrainingReport
from services.common.process.telemetry import lines_from_end, parse_json_line, read_json_lines
from services.trainer.checkpoints.steps import newest_step
from services.trainer.job import Job

METRICS_FILE = "metrics.jsonl"
ATTEMPTS_FILE = "attempts.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one step that the loop knows; the loss is in nats per token, the gradient norm is before clipping."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    gradient_norm: float
    learning_rate: float
    step_seconds: float
    data_seconds: float
    skipped_steps: int
    is_first_of_process: bool
    """Whether the step loaded or compiled the graphs of its process."""
    time: float
    """Seconds since 1970 at which the step ended. Its record may be written one step later."""


STEP_FIELDS = frozenset(field.name for field in fields(StepRecord)) | {
    *("step_tokens", "tokens_per_second", "goodput", "restarts"),
}
"""Fields that every line of METRICS_FILE has. Those of METRICS that are unknown at a step are left out."""
ATTEMPT_FIELDS = frozenset({"started_at", "setup_seconds", "train_seconds", "graphs_compiled", "new_cache_files"})
"""Fields that every line of ATTEMPTS_FILE has: one for each start of the workers that was not killed."""
REPORTED = ("step", "loss", "learning_rate", "tokens_per_second", "validation_loss")
"""Fields of a step's record that a Ray cluster is told."""


def steps_newest_first(run_folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps that led to the newest one, newest first, in constant memory. Unreadable lines are left out.

    After a crash or a loss spike a run does steps again; their earlier records are left out. Reading starts at the end
    of the file, because a run of months has millions of lines.
    """
    done_again = math.inf  # steps from here on were done again later
    for line in islice(lines_from_end(run_folder / METRICS_FILE), 1, None):  # a killed writer did not finish the last
        record = parse_json_line(line)
        if _has_fields(record, STEP_FIELDS) and record["step"] < done_again:
            done_again = record["step"]
            yield record


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return one record per step, oldest first; see `steps_newest_first`."""
    return list(steps_newest_first(run_folder))[::-1]


def read_last_step(run_folder: Path) -> dict[str, Any] | None:
    """Return the newest record of a run; None if there is none, or while the file cannot be read."""
    with suppress(OSError):
        return next(steps_newest_first(run_folder), None)
    return None


def read_record_of(run_folder: Path, step: int) -> dict[str, Any] | None:
    """Return the newest record of `step`, or of the last step before it that has one; None if there is none."""
    return next((record for record in steps_newest_first(run_folder) if record["step"] <= step), None)


def read_report(job: Job) -> TrainingReport | None:
    """Return what Ray Train is told: the newest record and the newest checkpoint; None before the first step."""
    record, step = read_last_step(job.run_folder), newest_step(job.checkpoint_collection)
    if record is None:
        return None
    reported = {name: float(record[name]) for name in REPORTED if isinstance(record.get(name), int | float)}
    return TrainingReport(reported, job.checkpoint_address(step).path if step else None)


def read_attempts(run_folder: Path) -> list[dict[str, Any]]:
    return read_lines(run_folder / ATTEMPTS_FILE, ATTEMPT_FIELDS)


def read_lines(path: Path, names: Set[str]) -> list[dict[str, Any]]:
    """Return the lines of a file that are JSON objects with all the fields in `names`; none if there is no file."""
    return [line for line in read_json_lines(path) if _has_fields(line, names)]


def _has_fields(record: dict[str, Any] | None, names: Set[str]) -> TypeGuard[dict[str, Any]]:
    return record is not None and names <= record.keys()
