"""Fixtures for training in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from services.common.testing import fork_server
from services.trainer.job import Job
from services.trainer.tests.builders import NewJob, building_jobs, train_new
from services.trainer.tests.evaluated import target_losses

fork_server.preload("services.trainer.supervision.supervise", "services.trainer.tests.work")


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Fork the workers of tests and of commands that tests call; commands in processes of their own are unchanged."""
    with fork_server.forking_workers():
        yield


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[NewJob]:
    """Build a job on a corpus under `root`; overrides as `train__max_steps="7"`."""
    with building_jobs(tmp_path) as build:
        yield build


@pytest.fixture(scope="module")
def new_shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewJob]:
    """Build a job for a run that the tests of a module share; see `new_job`."""
    folder = tmp_path_factory.mktemp("shared")
    with building_jobs(folder) as build:
        yield build


@pytest.fixture(scope="module")
def evaluated_run(new_shared_job: NewJob) -> Job:
    """A run of three steps by one worker, which evaluates the whole split at the begin and at the end."""
    return train_new(new_shared_job, train__max_steps="3", train__evaluation_tokens="1000000")


@pytest.fixture(scope="module")
def transformers_losses(evaluated_run: Job, tmp_path_factory: pytest.TempPathFactory) -> npt.NDArray[np.float64]:
    """Losses of all targets of `evaluated_run`'s validation split, by transformers."""
    return target_losses(evaluated_run, tmp_path_factory.mktemp("exported") / "model")


@pytest.fixture
def tensor_reference() -> Iterator[type]:
    """Make a class that is pickled under the name of torch_xla's, which need not be installed."""
    name = "torch_xla.utils.serialization"
    module = ModuleType(name)
    reference = type("TensorReference", (), {"__module__": name})
    module.__dict__["TensorReference"] = reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_xla", sys.modules.get("torch_xla", ModuleType("torch_xla")))
        patch.setitem(sys.modules, name, module)
        yield reference
