"""Fixtures that run the stage with a given vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.tokenizer.tests.bad_input.stage import Stage


@pytest.fixture
def stage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    return Stage(tmp_path, model, capsys)
