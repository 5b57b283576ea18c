"""Fixtures that run the stage with a given vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.tokenizer.tests.bad_input.stage import PIECES, Stage
from services.tokenizer.tests.builders import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vocabulary"), PIECES)


@pytest.fixture
def stage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    return Stage(tmp_path, model, capsys)
