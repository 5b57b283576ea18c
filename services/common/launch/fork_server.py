"""A process that imports what workers run, and from which they are forked: none of them imports anything itself.

It imports while the command does the same and looks after its artifacts, and a worker that replaces a lost one starts
in milliseconds. Forking is safe because the server imports, waits and forks, and does nothing else: no thread of its
libraries holds a lock. It is not `multiprocessing`'s, which collects garbage while it imports (a quarter of the time),
and which finishes its imports when the command was killed meanwhile.

For Linux: the kernel ends the server with the command, and the workers with the server.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from services.common.errors import WorkersLost
from services.common.stop_signals import STOP_SIGNALS, deferring_stop_signals

IS_SUPPORTED = sys.platform == "linux"

_NUMBER = struct.Struct("i")
_READY = b"ready"
_FORK = b"fork"
_SET_PARENT_DEATH_SIGNAL = 1  # of linux/prctl.h


class ForkedProcess:
    """A child of the server, with what this program uses of `multiprocessing.Process`."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.sentinel = status
        """Can be read when the process has ended."""
        self._exit_code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while the process runs."""
        if self._exit_code is None and select.select([self.sentinel], [], [], 0)[0]:
            self.join()
        return self._exit_code

    def join(self) -> None:
        if self._exit_code is None:
            # Nothing where the server was killed, and with it this process.
            written = os.read(self.sentinel, _NUMBER.size)
            self._exit_code = _NUMBER.unpack(written)[0] if written else -signal.SIGKILL

    def kill(self) -> None:
        if self.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)


class ForkServer:
    """The command's side of it."""

    def __init__(self, modules: Sequence[str]) -> None:
        """To be called in the main thread: the kernel ends the server with the thread that started it."""
        self.modules = frozenset(modules)
        self._is_ready = False
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

    def fork(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        sender: Connection,
        take: Callable[[ForkedProcess], None],
    ) -> None:
        """Run `function(*arguments, sender)` in a new process with the environment of this one, once all is imported.

        `take` gets the process, before a stop signal that came meanwhile is delivered: nobody else would end it. The
        function is importable. Raises `WorkersLost` when the server was killed.
        """
        try:
            self._wait_until_ready()
            with deferring_stop_signals():
                process, request = self._fork(sender)
                take(process)
                with os.fdopen(request, "wb") as file, suppress(BrokenPipeError):  # the child was killed
                    pickle.dump((dict(os.environ), function, arguments), file)
        except (OSError, EOFError) as error:
            raise WorkersLost(f"the process that workers are forked from has ended: {error}") from error

    def _wait_until_ready(self) -> None:
        if not self._is_ready and self._socket.recv(len(_READY)) != _READY:
            raise EOFError("while it imported")
        self._is_ready = True

    def _fork(self, sender: Connection) -> tuple[ForkedProcess, int]:
        request_reader, request_writer = os.pipe()
        status_reader, status_writer = os.pipe()
        try:
            socket.send_fds(self._socket, [_FORK], [request_reader, status_writer, sender.fileno()])
            answer = self._socket.recv(_NUMBER.size)
            if not answer:
                raise EOFError("when it was to fork")
        except BaseException:
            os.close(request_writer)
            os.close(status_reader)
            raise
        finally:
            os.close(request_reader)
            os.close(status_writer)
        return ForkedProcess(_NUMBER.unpack(answer)[0], status_reader), request_writer


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
        traceback.print_exc()
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
