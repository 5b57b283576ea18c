"""A lock has one holder, also across processes, and is free as soon as its holder has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from services.common.artifacts.lock import LockTaken, find_holder, hold_lock
from services.common.errors import StorageError
from services.common.testing import fork_server
from services.common.testing.fork_server import start_process
from services.common.testing.waiting import wait_until

fork_server.preload(__name__)

ROUNDS, WRITERS = 12, 4


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "run" / "0123456789abcdef.lock"


def hold(lock: Path) -> None:
    """Hold the lock until the process is killed, as does a child that it has forked."""
    with hold_lock(lock):
        if os.fork() == 0:
            lock.with_name("forked").touch()  # here: from now on the child has no lock
        threading.Event().wait(60)


def count(lock: Path) -> None:
    """Add ROUNDS to a number in a file, which loses some where two processes have the lock at a time."""
    number = lock.with_name("number")
    for _ in range(ROUNDS):
        with hold_lock(lock):
            value = int(number.read_text())
            time.sleep(0.0005)
            number.write_text(str(value + 1))


def test_of_many_writers_one_at_a_time_holds_a_lock_that_each_removes(lock: Path) -> None:
    lock.parent.mkdir()
    lock.with_name("number").write_text("0")
    writers = [start_process(count, lock) for _ in range(WRITERS)]
    for writer in writers:
        writer.join()

    assert int(lock.with_name("number").read_text()) == ROUNDS * WRITERS
    assert not lock.exists()


def test_a_killed_holder_frees_the_lock_although_its_child_lives(lock: Path) -> None:
    holder = start_process(hold, lock)
    wait_until(lock.with_name("forked").exists)
    assert find_holder(lock) == f"process {holder.pid} on {os.uname().nodename}"
    with pytest.raises(LockTaken) as taken, hold_lock(lock, waits=False):
        pass
    assert taken.value.exit_code == 75
    holder.kill()
    holder.join()

    assert find_holder(lock) is None
    with hold_lock(lock, waits=False):
        assert find_holder(lock)


def test_a_holders_child_neither_frees_nor_keeps_the_lock(lock: Path) -> None:
    with hold_lock(lock):
        holding = os.getpid()
        child = os.fork()
        if child:
            wait_until(lock.with_name("left").exists)
            assert find_holder(lock)
    if os.getpid() != holding:
        lock.with_name("left").touch()
        time.sleep(60)
    try:
        with hold_lock(lock, waits=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_mount_without_flock_is_a_storage_error(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError), hold_lock(lock):
        pass
