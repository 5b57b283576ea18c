"""Shares the heartbeats and the stop reason of a node between its workers and its agent, by a memory-mapped file.

    <node_folder>/board     64 bytes: format, number of workers, and the node's stop reason, which the agent writes
                            then a slot for each local worker: its heartbeat

A reader never waits for a writer, and no process that dies holds a lock. Each record carries its checksum, so a reader
that meets a writer halfway, or a machine that makes the stores of one core visible to another in a different order,
finds no value instead of a wrong one. The file takes 0.5 kB for each worker of the node, whatever the number of
nodes, and a process that has it open has one descriptor for it.

This module imports neither torch nor Ray: an agent starts without them.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path
from typing import Self

BOARD_FILE = "board"
HEARTBEAT_BYTES = 512
"""Most bytes of a worker's heartbeat."""

_FORMAT = b"board\n\0\0"
_HEADER_BYTES = 64
_NUM_WORKERS = struct.Struct("=Q")
_STOP_REASON = struct.Struct("=Q")
_NUM_WORKERS_AT, _STOP_REASON_AT = 8, 16

_CHECKSUM = struct.Struct("=I")
_HEARTBEAT_LENGTH = struct.Struct("=I")
_HEARTBEAT_SLOT_BYTES = _CHECKSUM.size + _HEARTBEAT_LENGTH.size + HEARTBEAT_BYTES


class NodeBoard:
    """One process's view of the board of its node. Each slot has one writer; everybody reads everything."""

    def __init__(self, path: Path) -> None:
        """Open the board at `path`, which `make` has made. Raises `ValueError` if another kind of file is there."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        is_board = self._map[: len(_FORMAT)] == _FORMAT
        self.num_workers: int = _NUM_WORKERS.unpack_from(self._map, _NUM_WORKERS_AT)[0] if is_board else 0
        """Number of workers that the board has a slot for."""
        if len(self._map) != _size_of(self.num_workers):
            self.close()
            raise ValueError(f"{path} is not a node's board, or has not the size for {self.num_workers} workers")

    @classmethod
    def make(cls, node_folder: Path, num_workers: int) -> Self:
        """Make the board of a node in its folder, before its workers start, and open it.

        Raises `OSError` where the folder's file system has no room for it: later writes need none.
        """
        partial = node_folder / f"{BOARD_FILE}.partial"
        with partial.open("xb") as file:
            # Written in full: where a disk has no room left, the kernel ends a process that writes to a mapped hole.
            file.write((_FORMAT + _NUM_WORKERS.pack(num_workers)).ljust(_size_of(num_workers), b"\0"))
        partial.rename(node_folder / BOARD_FILE)
        return cls.open(node_folder)

    @classmethod
    def open(cls, node_folder: Path) -> Self:
        """Open the board that is in a node's folder. Raises `FileNotFoundError` if nobody has made it."""
        return cls(node_folder / BOARD_FILE)

    def close(self) -> None:
        self._map.close()

    def write_heartbeat(self, local_rank: int, heartbeat: bytes) -> None:
        """Replace a worker's heartbeat, which has at most HEARTBEAT_BYTES. Only that worker calls this."""
        if len(heartbeat) > HEARTBEAT_BYTES:
            raise ValueError(f"a heartbeat of {len(heartbeat)} bytes is larger than {HEARTBEAT_BYTES}")
        self._write(self._slot(local_rank), _HEARTBEAT_LENGTH.pack(len(heartbeat)) + heartbeat)

    def heartbeat(self, local_rank: int) -> bytes:
        """Return a worker's newest heartbeat; empty if the worker has not written one, or is writing one now."""
        at = self._slot(local_rank) + _CHECKSUM.size
        (length,) = _HEARTBEAT_LENGTH.unpack_from(self._map, at)
        content = self._read(self._slot(local_rank), _HEARTBEAT_LENGTH.size + min(length, HEARTBEAT_BYTES))
        return content[_HEARTBEAT_LENGTH.size :]

    def raise_stop_reason(self, reason: int) -> None:
        """Tell the node's workers why they should stop; a weaker reason than an earlier one changes nothing.

        Only the node's agent calls this, when it hears of a preemption or gets a signal.
        """
        _STOP_REASON.pack_into(self._map, _STOP_REASON_AT, max(reason, self.stop_reason))

    @property
    def stop_reason(self) -> int:
        """The strongest stop reason that the node's agent has heard; 0 for none."""
        (reason,) = _STOP_REASON.unpack_from(self._map, _STOP_REASON_AT)
        return int(reason)

    def _slot(self, local_rank: int) -> int:
        return _HEADER_BYTES + local_rank * _HEARTBEAT_SLOT_BYTES

    def _write(self, at: int, content: bytes) -> None:
        self._map[at : at + _CHECKSUM.size + len(content)] = _CHECKSUM.pack(zlib.crc32(content)) + content

    def _read(self, at: int, num_bytes: int) -> bytes:
        """Return `num_bytes` of content; empty where the checksum before the content is not that of the content."""
        copied = self._map[at : at + _CHECKSUM.size + num_bytes]
        content = copied[_CHECKSUM.size :]
        return content if _CHECKSUM.unpack_from(copied)[0] == zlib.crc32(content) else b""


def _size_of(num_workers: int) -> int:
    return _HEADER_BYTES + num_workers * _HEARTBEAT_SLOT_BYTES
