"""A process that imports what workers run, and from which they are forked: none of them imports anything itself.

It imports while the command does the same and looks after its artifacts, and a worker that replaces a lost one starts
in milliseconds. Forking is safe because the server imports, waits and forks, and does nothing else: no thread of its
libraries holds a lock. It is not `multiprocessing`'s, which collects garbage while it imports (a quarter of the time),
and which finishes its imports when the command was killed meanwhile.

For Linux: the kernel ends the server with the command, and the workers with the server.

Whatever the command waits for here, the server may be frozen meanwhile, and then the command ends it, with its workers.
A server that is slow is told from one that is frozen by what the kernel says of it: it is stopped, for STOPPED_SECONDS,
or a worker of it has ended and it has not said so for ANSWER_SECONDS. A time alone would not tell: imports take a few
seconds, and 70 s where many processes share a core. And it cannot have a heartbeat, which would be a thread.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from services.common.errors import WorkersLost, print_traceback
from services.common.launch.process_family import STOPPED_SECONDS, Stopwatch, has_ended, is_stopped
from services.common.process.stop_signals import STOP_SIGNALS, deferring_stop_signals

IS_SUPPORTED = sys.platform == "linux"

logger = logging.getLogger(__name__)

IMPORT_SECONDS = 600.0
"""Seconds in which the server has to have imported what it shall."""
ANSWER_SECONDS = 20.0
"""Seconds in which a server that waits for nothing but us has to fork, or to say that a worker has ended: both take it
milliseconds.
"""
POLL_SECONDS = 0.5

_NUMBER = struct.Struct("i")
_READY = b"ready"
_FORK = b"fork"
_SET_PARENT_DEATH_SIGNAL = 1  # of linux/prctl.h


class ForkedProcess:
    """A child of the server, with what this program uses of `multiprocessing.Process`."""

    def __init__(self, pid: int, status: int, server: ForkServer) -> None:
        self.pid = pid
        self.sentinel = status
        """Can be read when the process has ended."""
        self._server = server
        self._exit_code: int | None = None
        self._stopped, self._ended = Stopwatch(), Stopwatch()

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while the process runs."""
        if self._exit_code is None and _is_readable(self.sentinel, 0):
            self.join()
        return self._exit_code

    def join(self) -> None:
        """Wait until the process has ended, or its server is ended because it does not answer."""
        if self._exit_code is None:
            while not _is_readable(self.sentinel, POLL_SECONDS):
                self._server.end_if_silent([self])
            # Nothing where the server was killed, and with it this process.
            written = os.read(self.sentinel, _NUMBER.size)
            self._exit_code = _NUMBER.unpack(written)[0] if written else -signal.SIGKILL

    def kill(self) -> None:
        if self.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)

    def end_if_stopped(self) -> None:
        """Kill the process if it has been stopped for STOPPED_SECONDS."""
        if self._stopped.look(is_stopped(self.pid)) >= STOPPED_SECONDS:
            self.kill()

    def unreported_seconds(self) -> float:
        """Seconds for which the process has ended and its server has not said so."""
        return self._ended.look(not _is_readable(self.sentinel, 0) and has_ended(self.pid))


class ForkServer:
    """The command's side of it."""

    def __init__(self, modules: Sequence[str]) -> None:
        """To be called in the main thread: the kernel ends the server with the thread that started it."""
        self.modules = frozenset(modules)
        self._is_ready = False
        self._stopped = Stopwatch()
        self._silence = ""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), *modules]
        with theirs, deferring_stop_signals():
            # It and its children begin with the stop signals blocked; a child lifts that when it ignores them.
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and what it has forked."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def end_if_silent(self, workers: Sequence[ForkedProcess] = (), waits_since: float | None = None) -> None:
        """Kill the server, and the kernel these workers of it, if it does not answer: it is stopped, it has not said of
        one of the workers that it has ended, or it has been asked for something at `waits_since`, in monotonic seconds.
        """
        limit = ANSWER_SECONDS if self._is_ready else IMPORT_SECONDS
        silent_seconds = time.monotonic() - waits_since if waits_since is not None else 0.0
        if self._stopped.look(is_stopped(self._process.pid)) >= STOPPED_SECONDS:
            self._silence = f"it was stopped for {STOPPED_SECONDS:.0f} s"
        elif silent_seconds >= limit:
            self._silence = f"it did not answer for {limit:.0f} s"
        elif max((worker.unreported_seconds() for worker in workers), default=0.0) >= ANSWER_SECONDS:
            self._silence = f"a worker has ended, and it did not say so for {ANSWER_SECONDS:.0f} s"
        else:
            return
        if self.is_alive:
            logger.warning(
                "the process that workers are forked from (pid %d) is ended, and with it its workers: %s",
                self._process.pid,
                self._silence,
            )
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_SECONDS)

    def require_answering(self, workers: Sequence[ForkedProcess]) -> None:
        """End the server as `end_if_silent` does. Raises `WorkersLost` where it was ended, now or before."""
        self.end_if_silent(workers)
        if self._silence:
            raise self._lost("killed")

    def fork(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        sender: Connection,
        take: Callable[[ForkedProcess], None],
    ) -> None:
        """Run `function(*arguments, sender)` in a new process with the environment of this one, once all is imported.

        `take` gets the process, before a stop signal that came meanwhile is delivered: nobody else would end it. The
        function is importable. Raises `WorkersLost` when the server was killed, or does not answer.
        """
        try:
            self._wait_until_ready()
            with deferring_stop_signals():
                process, request = self._fork(sender)
                take(process)
                with suppress(BrokenPipeError):  # the child was killed
                    self._send(process, request, pickle.dumps((dict(os.environ), function, arguments)))
        except (OSError, EOFError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, how: str) -> WorkersLost:
        return WorkersLost(
            f"the process that workers are forked from (pid {self._process.pid}) has ended: {self._silence or how}"
        )

    def _wait_until_ready(self) -> None:
        if not self._is_ready and self._receive(len(_READY)) != _READY:
            raise EOFError("while it imported")
        self._is_ready = True

    def _fork(self, sender: Connection) -> tuple[ForkedProcess, int]:
        request_reader, request_writer = os.pipe()
        status_reader, status_writer = os.pipe()
        try:
            socket.send_fds(self._socket, [_FORK], [request_reader, status_writer, sender.fileno()])
            answer = self._receive(_NUMBER.size)
            if not answer:
                raise EOFError("when it was to fork")
        except BaseException:
            os.close(request_writer)
            os.close(status_reader)
            raise
        finally:
            os.close(request_reader)
            os.close(status_writer)
        return ForkedProcess(_NUMBER.unpack(answer)[0], status_reader, self), request_writer

    def _receive(self, size: int) -> bytes:
        """The server's next message; empty when the server has ended, of itself or because it did not answer."""
        began_at = time.monotonic()
        while not _is_readable(self._socket.fileno(), POLL_SECONDS):
            self.end_if_silent(waits_since=began_at)
        return self._socket.recv(size)

    def _send(self, process: ForkedProcess, request: int, content: bytes) -> None:
        """Write the child's task, and close the pipe: a child that is frozen reads none, and a pipe holds 64 KiB."""
        with os.fdopen(request, "wb", buffering=0) as file:
            os.set_blocking(request, False)
            left = memoryview(content)
            while left:
                if _can_write(request):
                    left = left[file.write(left) or 0 :]
                else:
                    process.end_if_stopped()
                    self.end_if_silent([process])


def _can_write(descriptor: int) -> bool:
    """Within POLL_SECONDS."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(POLL_SECONDS * 1000))


def _is_readable(descriptor: int, within_seconds: float) -> bool:
    """Wait by poll: a process with many open files has descriptors above what select takes."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_seconds * 1000))


def main(arguments: list[str]) -> None:
    """The server: import, then fork whenever the command asks, until it has gone."""
    descriptor, parent, *modules = arguments
    _end_with(int(parent))
    import_modules(modules, can_fork=True)
    with socket.socket(fileno=int(descriptor)) as command:
        command.send(_READY)
        _serve(command)


def import_modules(modules: Sequence[str], *, can_fork: bool) -> None:
    """Import MODULE, or call what is named MODULE:FUNCTION with `can_fork`: see `WorkerGroupSpec.preload`.

    No garbage is collected meanwhile, of which imports make none. What cannot be imported is left out, with a line on
    stderr: who needs it will say more.
    """
    gc.disable()
    for each in modules:
        module, _, function = each.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)(can_fork)
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            print(f"{each} was not imported before it is needed: {error!r}", file=sys.stderr)
    gc.freeze()  # modules stay; and a collection writes to each object that it looks at, which forks then do not share
    gc.enable()


def _serve(command: socket.socket) -> None:
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([command.fileno(), *running], [], [])
        for ended in running.keys() & ready:
            _report(ended, *running.pop(ended))
        if command.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(command, len(_FORK), 3, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            request, status, sender = descriptors
            life_reader, life_writer = os.pipe()
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                command.close()
                for each in (life_reader, *running, *(status for _, status in running.values())):
                    os.close(each)
                _run(server, request, Connection(sender, readable=False))
            for each in (request, sender, life_writer):
                os.close(each)
            running[life_reader] = (pid, status)
            command.send(_NUMBER.pack(pid))


def _report(life_reader: int, pid: int, status: int) -> None:
    """Of a child that has closed its end of this pipe, as it does when it ends."""
    os.close(life_reader)
    _, wait_status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(wait_status)))
    os.close(status)


def _run(server: int, request: int, sender: Connection) -> NoReturn:
    """A child. It keeps its ends of two pipes open: they close when it has ended."""
    exit_code = 1
    try:
        _end_with(server)
        with os.fdopen(request, "rb") as file:
            environment, function, arguments = pickle.load(file)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # of the server's environment
        function(*arguments, sender)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - a fork must not go on in its parent's program
        print_traceback()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
