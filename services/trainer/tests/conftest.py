"""Fixtures for training in the test's own process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
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
def new_job(tmp_path: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Build a job on a corpus under `root`; overrides as `train__max_steps="7"`."""
    # The node-local folder, which the command would remove: of this process, and of workers that it starts.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def build(root: str = "a", kind: VocabularyKind = "sentencepiece", **overrides: str) -> Job:
        recipe = make_recipe(tmp_path, **overrides)
        return make_job(tmp_path / root, recipe, make_corpus(tmp_path / root, recipe, kind=kind), lease)

    return build
