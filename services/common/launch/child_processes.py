"""Starts child processes so that none outlives its parent, and no stop signal ends a child that still imports."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, redirect_stderr
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from services.common.process.stop_signals import STOP_SIGNALS, deferring_stop_signals

# spawn, not fork: the command has threads (leases, progress), and a fork would copy locks that they hold.
SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def starting_processes() -> Iterator[None]:
    """Block the stop signals in processes that start inside the block, until they call `follow_parent`: while they
    import, a signal would end them, Ctrl-C with a traceback. This process gets its own signals after the block.
    """
    with deferring_stop_signals():
        # SIGHUP would end the resource tracker. The tracker starts first, because its start unblocks other signals.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with redirect_stderr(io.StringIO()):  # the successor of a killed tracker prints tracebacks
                resource_tracker.ensure_running()
            resource_tracker.unregister = _unregister
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


def _unregister(name: Sized, rtype: str) -> None:
    """Let the resource tracker forget a semaphore, unless the tracker was killed: its successor does not know the
    semaphore and would print a traceback. The command's guard removes such semaphores.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None and tracker._check_alive():
        tracker.unregister(name, rtype)
