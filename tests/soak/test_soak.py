"""A soak of a minute ends with its table, and its audit finds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.testing.seeds import draw_seed
from tests.soak.stage_run import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts file systems")
def test_the_audit_of_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    options = ("--minutes", "1", "--seed", str(draw_seed()), "--folder", str(tmp_path / "soak"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *options], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| fault | count | outcomes |" in done.stdout
