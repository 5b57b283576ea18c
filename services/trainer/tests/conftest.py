"""Fixtures for training in the test's own process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.common.artifacts.corpus import VocabularyKind
from services.common.artifacts.lease import Lease, hold_lease
from services.trainer.job import Job
from services.trainer.tests.builders import make_corpus, make_job, make_recipe


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


@contextmanager
def building_jobs(folder: Path, lease: Lease) -> Iterator[Callable[..., Job]]:
    def build(root: str = "a", kind: VocabularyKind = "sentencepiece", **overrides: str) -> Job:
        recipe = make_recipe(folder, **overrides)
        return make_job(folder / root, recipe, make_corpus(folder / root, recipe, kind=kind), lease)

    with pytest.MonkeyPatch.context() as patch:
        # The node-local folder, which the command would remove: of this process, and of workers that it starts.
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield build
