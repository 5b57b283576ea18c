"""Runs the trainer's whole loop, which also reads batches from a corpus, records metrics, evaluates and saves."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.trainer.workbench import Workbench
from services.common.launch.launcher import WorkerEnvironment
from services.trainer.loop import train
from services.trainer.metrics.records import read_metrics
from services.trainer.tests.builders import make_corpus, make_job


def run_loop(bench: Workbench) -> tuple[list[float], list[float]]:
    """Return the seconds of all steps, and the part that they waited for tokens; the step is not compiled."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    recipe = bench.recipe()
    corpus = make_corpus(folder, recipe, kind="tiktoken")  # the kind with any vocabulary size
    job = make_job(folder, recipe, corpus)
    train(job, WorkerEnvironment(rank=0, world_size=1))
    records = [each for each in read_metrics(job.run_folder) if "step_seconds" in each]
    return [each["step_seconds"] for each in records], [each["data_seconds"] for each in records]
