"""Our own loop, with what it does beside steps: reads its batches from a corpus, records, evaluates, saves."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.trainer.workbench import Workbench
from services.common.artifacts.lease import hold_lease
from services.common.launch.launcher import WorkerEnvironment
from services.trainer.loop import train
from services.trainer.metrics.records import read_metrics
from services.trainer.tests.builders import make_corpus, make_job


def run_loop(bench: Workbench) -> tuple[list[float], list[float]]:
    """Seconds of all steps, and of them those before the step's tokens were there; not compiled."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    recipe = bench.recipe()
    corpus = make_corpus(folder, recipe, kind="tiktoken")  # which takes any size of a vocabulary
    with hold_lease(folder / "run.lock") as held:
        job = make_job(folder, recipe, corpus, held.lease)
        train(job, WorkerEnvironment(rank=0, world_size=1, launch="inline"))
    records = [each for each in read_metrics(job.run_folder).lines if "step_seconds" in each]
    return [each["step_seconds"] for each in records], [each["data_seconds"] for each in records]
