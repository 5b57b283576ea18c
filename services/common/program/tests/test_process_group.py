"""A worker that hangs ends the collectives of the others at their limit, although workers connect when they need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.program.sealed_messages import seal, unseal
from services.common.program.tests import hung_workers


@pytest.mark.parametrize("name", ["maximum", "gather", "exact sum", "fast sum", "connect"])
def test_a_worker_that_hangs_is_lost_after_the_limit_of_a_collective(tmp_path: Path, name: str) -> None:
    work = hung_workers.lose_a_worker_that_never_connects if name == "connect" else hung_workers.lose_a_worker
    spec = WorkerGroupSpec(hung_workers.WORKERS, 1, hung_workers.WORKERS, tmp_path)
    folder = tmp_path / "found"
    folder.mkdir()
    run_workers(inline, work, (name, folder), spec)

    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == dict.fromkeys("012", "lost")


def test_bytes_of_a_process_without_the_key_of_the_start_are_not_unpickled(tmp_path: Path) -> None:
    (folder := tmp_path / "found").mkdir()
    run_workers(inline, hung_workers.join_with_another_key, folder, WorkerGroupSpec(2, 1, 2, tmp_path))

    assert "rank 1 to rank 0, message 1: " in (folder / "0").read_text(encoding="utf-8")


def test_a_message_that_is_sent_again_at_another_place_is_not_unpickled(tmp_path: Path) -> None:
    (folder := tmp_path / "found").mkdir()
    run_workers(inline, hung_workers.send_a_message_again, folder, WorkerGroupSpec(2, 1, 2, tmp_path))

    assert "rank 1 to rank 0, message 3: " in (folder / "0").read_text(encoding="utf-8")


def test_a_seal_is_for_one_key_one_route_and_one_content() -> None:
    key, message = bytes(32), seal(bytes(32), "rank 1 to rank 0", b"content")

    assert unseal(key, "rank 1 to rank 0", message) == b"content"
    for other in (
        (bytes(31) + b"1", "rank 1 to rank 0", message),
        (key, "rank 2 to rank 0", message),
        (key, "rank 1 to rank 0", b"-" + message),
        (key, "rank 1 to rank 0", message[:20]),
        (key, "rank 1 to rank 0", b""),
    ):
        with pytest.raises(ValueError, match="no valid seal"):
            unseal(*other)
