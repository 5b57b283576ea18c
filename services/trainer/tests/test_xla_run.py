"""A run on torch_xla trains, evaluates, commits checkpoints and resumes as one on plain PyTorch does.

On torch_xla's CPU device, where one worker can execute graphs.
"""

from __future__ import annotations

import importlib.util

import pytest

from services.trainer.metrics.records import read_metrics
from services.trainer.tests.builders import NewJob, train_new

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not here: `make test-torch29` has it"
)

ALONE = {"parallel__data_parallel_size": "1", "train__reduction": "fast", "optimizer__decay_steps": "10"}
ON_XLA = {"parallel__device": "xla", "compile__enabled": "true"}


def train_to(new_job: NewJob, root: str, max_steps: int, **changed: str) -> dict[str, list[float]]:
    job = train_new(new_job, root, train__max_steps=str(max_steps), **ALONE, **changed)
    records = read_metrics(job.run_folder)
    names = ("loss", "gradient_norm", "validation_loss")
    return {name: [each[name] for each in records if name in each] for name in names}


def test_it_resumes_with_the_losses_of_a_run_that_was_not_stopped(
    new_job: NewJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    straight = train_to(new_job, "straight", 10, **ON_XLA)
    train_to(new_job, "stopped", 5, **ON_XLA)

    resumed = train_to(new_job, "stopped", 10, **ON_XLA)
    assert (resumed["loss"], resumed["gradient_norm"]) == (straight["loss"], straight["gradient_norm"])
    assert resumed["validation_loss"][-1:] == straight["validation_loss"]  # one more where it stopped
    for name, numbers in train_to(new_job, "plain", 10).items():
        assert straight[name] == pytest.approx(numbers, rel=1e-5), name
