"""Fixtures for training in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.artifacts.lease import Lease, hold_lease
from services.common.testing import fork_server
from services.trainer.job import Job
from services.trainer.tests.builders import building_jobs

fork_server.preload("services.trainer.supervise", "services.trainer.tests.work")


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Of commands and workers that a test calls; commands that it starts by themselves start theirs as they are."""
    with fork_server.forking_workers():
        yield


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    with hold_lease(tmp_path / "run.lock") as held:
        yield held.lease


@pytest.fixture
def new_job(tmp_path: Path, lease: Lease) -> Iterator[Callable[..., Job]]:
    """Build a job on a corpus under `root`; overrides as `train__max_steps="7"`."""
    with building_jobs(tmp_path, lease) as build:
        yield build


@pytest.fixture(scope="module")
def new_shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """As `new_job`, for runs that the tests of a module share."""
    folder = tmp_path_factory.mktemp("shared")
    with hold_lease(folder / "run.lock") as held, building_jobs(folder, held.lease) as build:
        yield build
