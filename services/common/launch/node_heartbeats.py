"""Gathers the heartbeats of a node's workers into one small file on the shared file system, which other nodes read.

    heartbeats/node-00003.jsonl    the node: its host, and the number of the write
                                   then a line for each worker: its heartbeat, and the seconds since it wrote that

Workers write their heartbeats to the node's board, which no file system sees. The node's agent looks at the board every
second, and writes the file every ten seconds. So a file system has one small write from each node in ten seconds,
whatever the number of workers. Clocks of nodes differ, so no time is compared between nodes: the agent measures how
long a worker is silent, and a file whose number of writes does not grow is that of a silent node.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.input.files import read_file
from services.common.launch.node_board import NodeBoard
from services.common.process.background_thread import running_in_background
from services.common.process.telemetry import parse_json_line

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
WRITE_SECONDS = 10.0
"""Seconds between two writes of a node's file."""
END_SECONDS = 2.0
"""Longest wait for the thread that writes, which may hang with the file system."""
_MAX_FILE_BYTES = 2**20
_NODE_FILE = re.compile(r"node-(\d+)\.jsonl", re.ASCII)


@dataclass
class WorkerHeartbeat:
    """The newest heartbeat of a worker."""

    content: bytes = b""
    """The heartbeat as the worker wrote it: a JSON object. Empty before the first one."""
    silent_seconds: float = 0.0
    """Seconds for which the worker has not replaced this heartbeat, by the agent's clock."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the heartbeat; empty where the content is not a JSON object."""
        return parse_json_line(self.content) or {}


@dataclass(frozen=True)
class NodeHeartbeats:
    """A node's file as it was read. Two reads of the file of a living node, WRITE_SECONDS apart, differ in `writes`."""

    writes: int = 0
    """Number of the write; 0 where there is no file, or the file cannot be read."""
    host: str = ""
    """Name of the node's host."""
    workers: list[WorkerHeartbeat] = field(default_factory=list)


class NodeHeartbeatFile:
    """Looks at a node's board, and writes the node's file where that is due."""

    def __init__(self, board: NodeBoard, path: Path) -> None:
        self._board, self._path = board, path
        self._workers = [WorkerHeartbeat() for _ in range(board.num_workers)]
        self._writes, self._is_complete = 0, False
        self._unwritten_seconds = 0.0

    def look(self, seconds: float, is_last: bool = False) -> None:
        """Look at the board, `seconds` of this process's own time after the last look.

        The first write is due as soon as all workers have a heartbeat, and one with the last look. Nothing is written
        while no worker has one.
        """
        self._unwritten_seconds += seconds
        for local_rank, worker in enumerate(self._workers):
            content = self._board.heartbeat(local_rank)
            if content and content != worker.content:
                self._workers[local_rank] = WorkerHeartbeat(content)
            elif worker.content:
                worker.silent_seconds += seconds
        spoken = [bool(worker.content) for worker in self._workers]
        is_first = all(spoken) and not self._is_complete
        if any(spoken) and (is_first or is_last or self._unwritten_seconds >= WRITE_SECONDS):
            self._is_complete, self._unwritten_seconds = all(spoken), 0.0
            self._write()

    def _write(self) -> None:
        self._writes += 1
        lines = [json.dumps({"host": socket.gethostname(), "writes": self._writes, "time": time.time()})]
        for worker in self._workers:
            silence = {"silent_seconds": round(worker.silent_seconds, 1)}
            lines.append(json.dumps(worker.fields | silence))
        partial = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
                partial.replace(self._path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("no heartbeats of the node: %s", error)


@contextmanager
def writing_heartbeats(board: NodeBoard, path: Path) -> Iterator[None]:
    """Write the node's file from a thread during the block."""
    file = NodeHeartbeatFile(board, path)

    def write(is_over: threading.Event) -> None:
        before = time.monotonic()
        is_last = False
        while not is_last:
            is_last = is_over.wait(LOOK_SECONDS)
            now = time.monotonic()
            # While this process is frozen no worker is silent.
            file.look(min(now - before, 2 * LOOK_SECONDS), is_last)
            before = now

    with running_in_background(write, "heartbeats", END_SECONDS):
        yield


def node_heartbeat_file(shared_folder: Path, node_rank: int) -> Path:
    """Return the path of a node's file of heartbeats."""
    return shared_folder / "heartbeats" / f"node-{node_rank:05d}.jsonl"


def list_nodes(shared_folder: Path) -> list[int]:
    """Return the ranks of the nodes that have a file, in order; an earlier start on more nodes may have left some."""
    found = [_NODE_FILE.fullmatch(path.name) for path in (shared_folder / "heartbeats").glob("node-*")]
    return sorted(int(name[1]) for name in found if name)


def read_node_heartbeats(shared_folder: Path, node_rank: int) -> NodeHeartbeats:
    """Read the file of a node. Each line that cannot be read stands for a worker without a heartbeat."""
    try:
        content = read_file(node_heartbeat_file(shared_folder, node_rank), max_bytes=_MAX_FILE_BYTES)
    except (OSError, ValueError):
        return NodeHeartbeats()
    first, *workers = content.splitlines() or [b""]
    node = parse_json_line(first) or {}
    writes, host = node.get("writes"), node.get("host")
    if not isinstance(writes, int) or not isinstance(host, str):
        return NodeHeartbeats()
    return NodeHeartbeats(writes, host, [_read_worker(line) for line in workers])


def _read_worker(line: bytes) -> WorkerHeartbeat:
    silent_seconds = (parse_json_line(line) or {}).get("silent_seconds")
    return WorkerHeartbeat(line, silent_seconds if isinstance(silent_seconds, int | float) else 0.0)
