"""The board of a node: what one process writes, another reads whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.launch.node_board import BOARD_FILE, HEARTBEAT_BYTES, NodeBoard
from services.common.tests.builders import REPOSITORY

WRITER = """
import sys
from pathlib import Path
from services.common.launch.node_board import NodeBoard
board = NodeBoard.open(Path(sys.argv[1]))
for value in range(1000, 9000):
    board.write_heartbeat(1, str(value).encode() * 100)
print(sorted(name for name in ("torch", "ray") if name in sys.modules))
"""


def test_workers_and_the_agent_of_a_node_read_what_the_others_wrote(tmp_path: Path) -> None:
    agent = NodeBoard.make(tmp_path, num_workers=3)
    workers = [NodeBoard.open(tmp_path) for _ in range(3)]

    workers[1].write_heartbeat(1, b'{"phase": "step"}')

    assert workers[0].num_workers == 3
    assert agent.heartbeat(1) == b'{"phase": "step"}'


def test_a_slot_that_nobody_has_written_is_empty(tmp_path: Path) -> None:
    board = NodeBoard.make(tmp_path, num_workers=2)

    assert board.heartbeat(1) == b""
    assert board.stop_reason == 0


def test_the_strongest_stop_reason_stays(tmp_path: Path) -> None:
    agent, worker = NodeBoard.make(tmp_path, num_workers=1), NodeBoard.open(tmp_path)
    for reason in (2, 4, 3):
        agent.raise_stop_reason(reason)

    assert worker.stop_reason == 4


def test_a_reader_beside_a_writer_finds_whole_values_alone(tmp_path: Path) -> None:
    board = NodeBoard.make(tmp_path, num_workers=2)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    seen: set[bytes] = set()
    while writer.poll() is None:
        beat = board.heartbeat(1)
        seen.add(beat)
        assert beat == beat[:4] * 100
    assert writer.communicate()[0].strip() == "[]"  # the module brings neither torch nor Ray along
    assert len(seen) > 1


def test_a_value_that_was_written_halfway_is_not_read(tmp_path: Path) -> None:
    board = NodeBoard.make(tmp_path, num_workers=1)
    board.write_heartbeat(0, b"alive")
    content = (tmp_path / BOARD_FILE).read_bytes()
    halfway = content.replace(b"alive", b"dead!")
    with (tmp_path / BOARD_FILE).open("r+b") as file:
        file.write(halfway)

    assert board.heartbeat(0) == b""


def test_what_has_no_room_is_refused(tmp_path: Path) -> None:
    board = NodeBoard.make(tmp_path, num_workers=1)
    with pytest.raises(ValueError, match=str(HEARTBEAT_BYTES)):
        board.write_heartbeat(0, bytes(HEARTBEAT_BYTES + 1))


def test_a_file_that_is_no_board_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeBoard.open(tmp_path)
    (tmp_path / BOARD_FILE).write_bytes(bytes(4096))
    with pytest.raises(ValueError, match=BOARD_FILE):
        NodeBoard.open(tmp_path)


def test_a_board_has_its_room_on_disk_before_anybody_writes_to_it(tmp_path: Path) -> None:
    """A write to a hole of a mapped file kills the writer where the disk is full."""
    NodeBoard.make(tmp_path, 64)
    made = (tmp_path / BOARD_FILE).stat()

    assert made.st_blocks * 512 >= made.st_size


def test_a_board_grows_with_the_workers_of_its_node_alone(tmp_path: Path) -> None:
    sizes = []
    for num_workers in (1, 2, 32):
        folder = tmp_path / str(num_workers)
        folder.mkdir()
        NodeBoard.make(folder, num_workers)
        sizes.append((folder / BOARD_FILE).stat().st_size)
    per_worker = sizes[1] - sizes[0]

    assert per_worker < 2000
    assert sizes[2] - sizes[0] == 31 * per_worker
