"""A worker that hangs ends the collectives of the others at their limit, although workers connect when they need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.program.tests import hung_workers


@pytest.mark.parametrize("name", ["maximum", "started maximum", "gather", "exact sum", "fast sum"])
def test_a_worker_that_hangs_is_lost_after_the_limit_of_a_collective(tmp_path: Path, name: str) -> None:
    spec = WorkerGroupSpec(hung_workers.WORKERS, 1, hung_workers.WORKERS, tmp_path)
    folder = tmp_path / "found"
    folder.mkdir()
    run_workers(inline, hung_workers.lose_a_worker, (name, folder), spec)

    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == dict.fromkeys("012", "lost")
