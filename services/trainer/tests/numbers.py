"""Golden numbers of 50 steps of the small recipe; `python -m services.trainer.tests.numbers` writes them again.

A change of these numbers belongs into the commit message and the changelog: runs in progress will not continue bit for
bit.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from services.trainer.job import Job
from services.trainer.metrics.records import read_metrics
from services.trainer.tests.builders import NewJob, building_jobs, train_new

GOLDEN = Path(__file__).with_name("golden_numbers.json")
NAMES = ("loss", "gradient_norm", "validation_loss")

Numbers = dict[str, dict[str, float]]
"""Values by the metric's name and the step."""


OF_GOLDEN_RUN = {"train__max_steps": "50", "optimizer__decay_steps": "50"}
"""Overrides of the small recipe."""


def train_golden(new_job: NewJob) -> Numbers:
    job = train_new(new_job, **OF_GOLDEN_RUN)
    return read_numbers(job)


def read_numbers(job: Job) -> Numbers:
    records = read_metrics(job.run_folder)
    return {name: {str(each["step"]): each[name] for each in records if name in each} for name in NAMES}


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    with building_jobs(folder) as new_job:
        GOLDEN.write_text(json.dumps(train_golden(new_job), indent=1) + "\n", encoding="utf-8")
