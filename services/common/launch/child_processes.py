"""Starts child processes so that none outlives its parent, and no stop signal ends a child that still imports."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

from services.common.process.shutdown import STOP_SIGNALS, deferring_stop_signals

# spawn, not fork: the command has threads (progress), and a fork would copy locks that they hold.
SPAWN = multiprocessing.get_context("spawn")

_LONGEST_BASE = 18
"""Characters of the longest TMPDIR in which sockets have room: their path ends at 103 bytes on macOS, and Ray adds 64
to that of its folder, `/millrace-ray-12345678`.
"""


def start_method(preload: Sequence[str]) -> str:
    """Return the start method of `multiprocessing` for processes that are forked with the imports of `preload`."""
    return "forkserver" if preload and sys.platform == "linux" else "spawn"


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the fork server of `multiprocessing`, unless it runs, and let it import `preload` meanwhile.

    Without `preload`, and where processes are not forked, nothing happens.
    """
    if start_method(preload) != "forkserver" or _folders:
        return
    folder = ExitStack()
    before = tempfile.tempdir
    multiprocessing.set_forkserver_preload(list(preload))
    try:
        tempfile.tempdir = str(folder.enter_context(socket_folder("millrace-fork-")))
        with handing_on_imports(), starting_processes():
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
    _folders.append(folder)
    Finalize(None, folder.close, exitpriority=-200)  # after multiprocessing has removed what it keeps there


@contextmanager
def socket_folder(prefix: str) -> Iterator[Path]:
    """Make a temporary folder for the block, in /tmp where TMPDIR is too long for the sockets below the folder."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base if len(base) <= _LONGEST_BASE else "/tmp"))  # nosec B108
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_folders: list[ExitStack] = []
"""The folder of the fork server's socket, once it has one."""


def python_path() -> str:
    """Return the PYTHONPATH with which another process imports what this one can."""
    return os.pathsep.join(filter(None, sys.path))


@contextmanager
def handing_on_imports() -> Iterator[None]:
    """Let programs that start inside the block import what this process can."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = python_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def starting_processes() -> Iterator[None]:
    """Block the stop signals in processes that start inside the block, until they call `follow_parent`: while they
    import, a signal would end them, Ctrl-C with a traceback. This process gets its own signals after the block.
    """
    with deferring_stop_signals():
        # SIGHUP would end the resource tracker. The tracker starts first, because its start unblocks other signals.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def follow_parent(ignored: Sequence[signal.Signals]) -> None:
    """End this process when its parent dies, also by SIGKILL, and leave the `ignored` signals to the parent."""
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, name="follow-parent", daemon=True).start()


def kill_processes(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run: workers that lost a peer may be blocked in a collective for minutes.

    All are killed before the first is waited for, because a process with much memory takes seconds to die.
    """
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
