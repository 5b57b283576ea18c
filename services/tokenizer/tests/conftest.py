"""Workers and vocabulary of the tokenizer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.testing import fork_server
from services.tokenizer.tests.bad_input.stage import Stage
from services.tokenizer.tests.builders import write_model

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
