"""Notices which files below a folder are opened, by any process of this machine, with the kernel's inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OPEN, _CLOSE, _IS_FOLDER, _OVERFLOW = 0x20, 0x18, 0x4000_0000, 0x4000
_HEADER = struct.Struct("iIII")


class FileOpens:
    """The opens of files below a folder. Python's audit hooks would miss the opens of Arrow and of other processes."""

    def __init__(self, root: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._seen: list[Path] = []
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
        watches = [libc.inotify_add_watch(self._descriptor, os.fsencode(each), _OPEN | _CLOSE) for each in folders]
        assert min(self._descriptor, *watches) >= 0, os.strerror(ctypes.get_errno())
        self._folders = dict(zip(watches, folders, strict=True))

    @property
    def paths(self) -> list[Path]:
        """The files in the order of their opens so far. The kernel merges two opens of one file between which no other
        file is opened and the file is not closed.
        """
        with suppress(BlockingIOError):  # all is read
            while self._descriptor >= 0:
                self._add(os.read(self._descriptor, 2**16))
        return list(self._seen)

    def close(self) -> None:
        """Keep the opens so far, and notice no more."""
        self.paths  # noqa: B018 - reads what the kernel still has
        os.close(self._descriptor)
        self._descriptor = -1

    def _add(self, events: bytes) -> None:
        position = 0
        while position < len(events):
            watch, mask, _, length = _HEADER.unpack_from(events, position)
            name = events[position + _HEADER.size :][:length].rstrip(b"\0")
            position += _HEADER.size + length
            assert not mask & _OVERFLOW, "more opens than the kernel remembers"
            if name and mask & _OPEN and not mask & _IS_FOLDER:
                self._seen.append(self._folders[watch] / os.fsdecode(name))


@contextmanager
def noticing_opens(root: Path) -> Iterator[FileOpens]:
    """Notice the opens of all files below `root` during the block."""
    opens = FileOpens(root)
    try:
        yield opens
    finally:
        opens.close()
