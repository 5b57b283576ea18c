"""Locks a path for one writer at a time, across processes and nodes, by an exclusive flock on a file beside it.

The kernel, or the lock server of Lustre, frees the lock when its holder dies. What each mount guarantees:
docs/decisions/0004-locks-by-flock.md.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from services.common.errors import StorageError, TryAgain

logger = logging.getLogger(__name__)

_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_descriptors: set[int] = set()


class LockTaken(TryAgain):
    """Another process holds the lock, and the caller did not want to wait."""


@contextmanager
def hold_lock(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold the lock file `path` during the block. It is made if absent, and removed at the end.

    Waits for another holder, or raises `LockTaken` where `waits` is False. The lock is this process's alone: children
    do not inherit it. Raises `StorageError` on a file system without locks.
    """
    _close_in_forked_children()
    descriptor = _acquire(path, waits)
    try:
        yield
    finally:
        if descriptor in _descriptors:  # not in a forked child
            with suppress(OSError):
                path.unlink()  # while it is held: the next one that gets this file sees that its name is gone
            _close(descriptor)


def find_holder(path: Path) -> str | None:
    """Return the name of the process that holds the lock, such as "process 12 on node-3"; None for a free one."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _read_holder(path)
    return None


def _acquire(path: Path, waits: bool) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _descriptors.add(descriptor)
        try:
            _lock(descriptor, path, waits)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                with suppress(OSError):  # a full disk, which `gc` is about to empty
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except FileNotFoundError:
            pass  # the holder before removed the file, as does a file with another inode
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)


def _lock(descriptor: int, path: Path, waits: bool) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(path)
            if not waits:
                raise LockTaken(f"{path}: held by {holder}") from None
            logger.info("%s is being written by %s; waiting for it", path.with_suffix(""), holder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise StorageError(f"{path}: no flock here ({error.strerror}). Mount Lustre with the option flock.") from error


def _read_holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


@cache
def _close_in_forked_children() -> None:
    """Close the locks of this process in each child that it forks: both would else share the lock."""

    def close() -> None:
        while _descriptors:
            os.close(_descriptors.pop())

    os.register_at_fork(after_in_child=close)
