"""Watches the Ray that a command uses, and ends the command's calls into a Ray that is lost.

Ray's library would end the process with 1, up to a minute after the loss. The watch notices a loss within seconds, so
that the command ends with the code of `TryAgain`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray

from services.common.errors import MillraceError, TryAgain
from services.common.launch.cluster_address import split_address
from services.common.process.stop_signals import deferring_stop_signals

POLL_SECONDS = 1.0
LOST_SECONDS = 20.0
"""Seconds in which a command that has lost Ray has to end in order; then it is ended at once."""
PROBE_SECONDS = 10.0
"""Seconds between two connections that show whether the cluster's head is alive."""
LOST_HEAD_FAILURES = 4  # failed connections in a row; Ray's library ends the process after 60 s without the head


class _RayWatch:
    """Notices in a thread that Ray itself is lost."""

    def __init__(self) -> None:
        self._lost = threading.Event()
        self._what = ""

    def begin(self, find_lost: Callable[[], str]) -> None:
        """Call `find_lost` until it names what is lost in a few words, or the command has left Ray."""
        threading.Thread(target=self._ask, args=(find_lost,), name="ray-watch", daemon=True).start()

    def is_lost(self, within_seconds: float = 0.0) -> bool:
        """Whether Ray itself was lost: then no call into Ray may be made any more."""
        return self._lost.wait(within_seconds)

    def require_ray(self) -> None:
        """Raise `TryAgain` when Ray itself was lost."""
        if self.is_lost():
            raise self.loss

    @property
    def loss(self) -> TryAgain:
        return TryAgain(f"Ray was lost: {self._what}. Run the same command again: it continues committed work.")

    def _ask(self, find_lost: Callable[[], str]) -> None:
        watched = ray._private.worker._global_node
        while not self._what:
            time.sleep(POLL_SECONDS)
            self._what = find_lost()
            if not ray.is_initialized() or ray._private.worker._global_node is not watched:
                self._what = ""
                return
        self._lost.set()
        time.sleep(LOST_SECONDS)  # only a main thread that hangs in a call into Ray takes longer
        os.write(2, f"millrace: {self.loss}\n".encode())
        os._exit(TryAgain.exit_code)


_watch = _RayWatch()
is_lost, require_ray = _watch.is_lost, _watch.require_ray


def watch_processes(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Watch the processes of a Ray that this command has started: each is essential."""
    _watch.begin(partial(find_ended, processes))


def watch_cluster(address: str, raylet_socket: str) -> None:
    """Watch a cluster that this command has joined. Raises `OSError` where this node's raylet does not answer."""
    _watch.begin(_Liveness(address, raylet_socket).find_lost)


@contextmanager
def calling_ray() -> Iterator[None]:
    """Defer stop signals during a call into Ray by the main thread: Ray prints and drops what a signal handler raises.

    Raises `TryAgain` when Ray is lost.
    """
    with deferring_stop_signals():
        try:
            require_ray()
            yield
        except MillraceError:
            raise
        except Exception as error:
            if is_lost(within_seconds=2 * POLL_SECONDS):
                raise _watch.loss from error
            raise


class RayCall:
    """A long call into Ray, in a thread: in the main thread it would keep Ctrl-C and SIGTERM from the command."""

    running: ClassVar[set[RayCall]] = set()

    def __init__(self, call: Callable[[], object], goes_on: bool = False) -> None:
        """`goes_on` keeps the thread until the process ends: the kernel kills Ray's processes with the thread that has
        started them.
        """
        self._call, self._goes_on = call, goes_on
        self._has_ended = threading.Event()
        self._failure: Exception | None = None
        self.running.add(self)
        threading.Thread(target=self._run, name="ray-call", daemon=True).start()

    def wait(self, require: Callable[[], None] = require_ray) -> Exception | None:
        """Wait for the end of the call and return the exception that it raised. Raises `TryAgain` when Ray is lost,
        which `require` finds out.
        """
        while not self._has_ended.wait(0.2):
            require()
        return self._failure

    def has_ended(self, within_seconds: float) -> bool:
        return self._has_ended.wait(within_seconds)

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - the main thread waits for the call, and raises its error
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.running.remove(self)
        self._has_ended.set()
        if self._goes_on:
            threading.Event().wait()


def probe_port(address: str) -> None:
    """Connect to HOST:PORT for a moment. Raises `OSError` where nobody listens."""
    place = split_address(address)
    assert place is not None
    socket.create_connection(place, timeout=POLL_SECONDS).close()


def find_ended(processes: Sequence[subprocess.Popen[Any]]) -> str:
    """Name those of Ray's processes that have ended, in a few words; an empty string while all are alive."""
    ended = [process for process in processes if process.poll() is not None]
    names = [Path(str(process.args[0])).name for process in ended]  # type: ignore[index] # Ray passes lists
    return ", ".join(
        f"its process {name} ended with {process.returncode}" for name, process in zip(names, ended, strict=True)
    )


class _Liveness:
    """Checks whether the cluster's head and this node's raylet are alive.

    The head is asked over the network, which may fail for a while. The raylet is watched by an open connection, which
    ends with the raylet: seconds later Ray's library misses the raylet too, and ends the process with 1.
    """

    def __init__(self, address: str, raylet_socket: str) -> None:
        self._address, self._head_failures, self._head_due = address, 0, 0.0
        self._raylet = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._raylet.connect(raylet_socket)
        self._raylet.setblocking(False)

    def find_lost(self) -> str:
        """Name the one that is lost in a few words; an empty string while both are alive."""
        if not self._is_raylet_alive():
            return "its raylet on this node no longer answers"
        now = time.monotonic()
        if now >= self._head_due:
            self._head_due = now + PROBE_SECONDS
            self._head_failures = 0 if self._has_head() else self._head_failures + 1
        return "its head no longer answers" if self._head_failures >= LOST_HEAD_FAILURES else ""

    def _has_head(self) -> bool:
        try:
            probe_port(self._address)
        except OSError:
            return False
        return True

    def _is_raylet_alive(self) -> bool:
        try:
            return bool(self._raylet.recv(1, socket.MSG_PEEK))  # no bytes: the raylet has closed the connection
        except BlockingIOError:
            return True
        except OSError:
            return False
