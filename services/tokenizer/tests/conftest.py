"""Workers and vocabulary of the tokenizer's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.testing import fork_server
from services.tokenizer.tests.builders import Mix, Stage, publish, write_jsonl, write_model, write_recipe

fork_server.preload("services.tokenizer.encode_task", "services.tokenizer.ngram_overlap")


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """Fork the workers of commands that a test calls in its own process."""
    with fork_server.forking_workers():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A given vocabulary, which is trained once for all tests."""
    return write_model(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture
def stage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    """Runs the stage with a given vocabulary."""
    return Stage(tmp_path, model, capsys)


@pytest.fixture
def mix(tmp_path: Path, model: Path) -> Mix:
    """Makes a corpus of sources of documents with weights, with a given vocabulary, each time below another root."""
    roots = (tmp_path / f"fsx-{number}" for number in count())

    def mix(*sources: tuple[Sequence[bytes], float], **settings: Any) -> Artifact[CorpusManifest]:
        tables = [
            {"uri": str(write_jsonl(tmp_path / f"{number}.jsonl", documents)), "weight": weight}
            for number, (documents, weight) in enumerate(sources)
        ]
        return publish(write_recipe(tmp_path, *tables, model=model, **settings), next(roots))

    return mix
