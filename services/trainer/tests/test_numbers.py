"""The same recipe gives the same numbers: losses that this program gave once, which no change of its shape may move.

A change that moves them on purpose says so in its commit and in the changelog: runs that are under way will not go on
with the bits that they began with. Other CPUs round otherwise, hence the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.common.launch.launcher import WorkerEnvironment
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.metrics import read_metrics

# By the name in the metrics and the step.
NUMBERS = {
    "loss": {1: 5.707970619, 2: 5.671051979, 5: 5.541475296, 10: 5.306434631, 15: 5.013229370, 20: 4.937994003},
    "gradient_norm": {
        1: 0.526806772,
        2: 0.507474899,
        5: 0.541945577,
        10: 0.540979922,
        15: 0.582860768,
        20: 0.574079752,
    },
    "validation_loss": {10: 5.281329155, 20: 5.094398499},
}


def test_the_losses_are_those_that_they_were(new_job: Callable[..., Job]) -> None:
    job = new_job()
    train(job, WorkerEnvironment(rank=0, world_size=1, launch="inline"))

    records = {record["step"]: record for record in read_metrics(job.run_folder).lines}
    found = {name: {step: record[name] for step, record in records.items() if name in record} for name in NUMBERS}
    for name, expected in NUMBERS.items():
        assert {step: found[name][step] for step in expected} == pytest.approx(expected, rel=1e-5), name
