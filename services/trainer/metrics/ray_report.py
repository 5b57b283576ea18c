"""Reads from a run's records what Ray Train is told: `WorkerGroup.read_report`. It imports no torch."""

from __future__ import annotations

from services.common.launch.launcher import TrainingReport
from services.trainer.checkpoints.steps import newest_step
from services.trainer.job import Job
from services.trainer.metrics.records import read_last_step

REPORTED = ("step", "loss", "learning_rate", "tokens_per_second", "validation_loss")
"""Fields of a step's record that a Ray cluster is told."""


def read_report(job: Job) -> TrainingReport | None:
    """Return the newest record of the run and its newest checkpoint; None before the first step."""
    record, step = read_last_step(job.run_folder), newest_step(job.checkpoint_collection)
    if record is None:
        return None
    reported = {name: float(record[name]) for name in REPORTED if isinstance(record.get(name), int | float)}
    return TrainingReport(reported, job.checkpoint_address(step).path if step else None)
