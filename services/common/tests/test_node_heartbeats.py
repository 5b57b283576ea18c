"""The file of a node's heartbeats: how often an agent writes it, and how silent it says that workers are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.launch.node_board import NodeBoard
from services.common.launch.node_heartbeats import (
    WRITE_SECONDS,
    NodeHeartbeatFile,
    NodeHeartbeats,
    node_heartbeat_file,
    read_node_heartbeats,
    writing_heartbeats,
)
from services.common.testing.waiting import wait_until


@pytest.fixture
def board(tmp_path: Path) -> Iterator[NodeBoard]:
    board = NodeBoard.make(tmp_path, num_workers=32)
    yield board
    board.close()


def beat(board: NodeBoard, number: int, *, but: tuple[int, ...] = ()) -> None:
    for local_rank in range(board.num_workers):
        if local_rank not in but:
            content = {"rank": 96 + local_rank, "beats": number, "phase": "step"}
            board.write_heartbeat(local_rank, json.dumps(content).encode())


def test_a_node_writes_one_file_in_ten_seconds_whatever_the_number_of_workers(board: NodeBoard, tmp_path: Path) -> None:
    path = node_heartbeat_file(tmp_path, 3)
    file, seen = NodeHeartbeatFile(board, path), []
    for second in range(60):
        beat(board, second)
        file.look(1.0)
        seen.append(read_node_heartbeats(tmp_path, 3).writes)

    assert seen[0] == 1  # as soon as all workers have a heartbeat
    assert seen[-1] == 1 + 59 // WRITE_SECONDS
    assert [each.name for each in path.parent.iterdir()] == ["node-00003.jsonl"]
    assert path.stat().st_size < 4_096
    workers = read_node_heartbeats(tmp_path, 3).workers
    assert [worker.fields["rank"] for worker in workers] == [*range(96, 128)]


def test_a_worker_that_stops_writing_is_silent_in_the_file_and_the_others_are_not(
    board: NodeBoard, tmp_path: Path
) -> None:
    file = NodeHeartbeatFile(board, node_heartbeat_file(tmp_path, 0))
    for second in range(31):
        beat(board, second, but=(7,) if second > 4 else ())
        file.look(1.0)

    silences = [worker.silent_seconds for worker in read_node_heartbeats(tmp_path, 0).workers]
    assert silences[7] == 26
    assert set(silences[:7] + silences[8:]) == {0}


def test_a_worker_that_has_not_begun_delays_the_file_of_the_others_by_one_period_alone(
    board: NodeBoard, tmp_path: Path
) -> None:
    file = NodeHeartbeatFile(board, node_heartbeat_file(tmp_path, 0))
    file.look(100.0)
    assert read_node_heartbeats(tmp_path, 0) == NodeHeartbeats()
    for second in range(11):
        beat(board, second, but=(31,))
        file.look(1.0)

    found = read_node_heartbeats(tmp_path, 0).workers
    assert (found[0].fields["phase"], "phase" in found[31].fields) == ("step", False)


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"[]\n", b'{"writes": "two", "host": "a"}\n', b'{"writes": 2}\n'])
def test_a_file_that_is_none_is_that_of_no_worker(content: bytes, tmp_path: Path) -> None:
    (path := node_heartbeat_file(tmp_path, 0)).parent.mkdir()
    path.write_bytes(content)
    assert read_node_heartbeats(tmp_path, 0) == NodeHeartbeats()


def test_the_thread_writes_until_its_block_ends_and_a_folder_that_cannot_be_written_ends_nothing(
    board: NodeBoard, tmp_path: Path
) -> None:
    beat(board, 1)
    with writing_heartbeats(board, node_heartbeat_file(tmp_path, 0)):
        wait_until(lambda: read_node_heartbeats(tmp_path, 0).writes == 1)

    (tmp_path / "file").touch()
    file = NodeHeartbeatFile(board, node_heartbeat_file(tmp_path / "file", 0))
    file.look(1.0)
    assert read_node_heartbeats(tmp_path / "file", 0) == NodeHeartbeats()
