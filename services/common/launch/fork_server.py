"""Forks workers from a process that has imported what they run: a worker then starts in milliseconds.

That process is the fork server of `multiprocessing`, and this module adds what the standard library leaves out:

- The server imports without collecting garbage, which is a quarter of the time, and can call functions.
- The kernel kills the server when the command ends, also while it imports, and the workers when the server ends.
- A worker has the command's environment as it is when the worker starts, not as it was when the server started.
- The server's socket is in a private folder, whose path is short enough and which no killed command leaves behind.

Forking is safe because no module that the server imports leaves a thread. It works on Linux alone. A server that is
frozen is killed by the command's guard, as any process of the command is.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from services.common.process.private_folder import new_name, private_folder

IS_SUPPORTED = sys.platform == "linux"

_REQUEST = "MILLRACE_FORK_SERVER"
"""Environment variable of the server: the command's process id and names to import, separated by spaces."""
_SERVER_START = "services.common.launch.fork_server_start"
_SET_PARENT_DEATH_SIGNAL = 1  # of linux/prctl.h

_imported_by = os.getpid()
"""Id of the process that imported this module; in a forked worker that is the worker's server."""


class ForkedProcess(ForkServerProcess):
    """A process that ends with its server, and that has the environment of the process which starts it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        if os.getpid() != _imported_by:
            end_with(_imported_by)
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None  # the server's environment has chosen it
        super().run()


class ForkContext(ForkServerContext):
    """The `multiprocessing` context whose processes are `ForkedProcess`."""

    Process = ForkedProcess


def start_server(modules: Sequence[str]) -> None:
    """Start the server, unless it runs already, and let it import `modules` meanwhile: see `WorkerGroupSpec.preload`.

    Has to be called in the main thread: the kernel kills the server when the thread ends that started it.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        stack = ExitStack()
        config["tempdir"] = str(stack.enter_context(private_folder(new_name("fork"), is_short=True)))
        atexit.register(stack.close)
        multiprocessing.set_forkserver_preload([_SERVER_START])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # multiprocessing hands sys.path on and drops it
    os.environ[_REQUEST] = " ".join([str(os.getpid()), *modules])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def replace_server(modules: Sequence[str]) -> None:
    """Start another server in place of one that was killed, and that the kernel may still be ending.

    `multiprocessing` takes such a server for alive until the kernel has ended it.
    """
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing itself reaps it
    start_server(modules)


def begin_server() -> None:
    """Set up this process, a fork server before its first fork, as `start_server` has asked."""
    request = os.environ.get(_REQUEST, "").split()
    if request:
        end_with(int(request[0]))
        _import_modules(request[1:])


def _import_modules(modules: Sequence[str]) -> None:
    """Import every MODULE, and call every MODULE:FUNCTION: see `WorkerGroupSpec.preload`.

    No garbage is collected meanwhile: imports make none. A module that cannot be imported is left out, with a line on
    stderr: the code that needs it will fail with more to say.
    """
    gc.disable()
    for each in modules:
        module, _, function = each.partition(":")
        try:
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        except Exception as error:  # noqa: BLE001 - an import can raise anything
            print(f"{each} could not be imported in advance: {error!r}", file=sys.stderr)
    gc.freeze()  # a collection writes to every object that it looks at, and forks would then not share its memory
    gc.enable()


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends."""
    if IS_SUPPORTED:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent has ended already
            os._exit(1)
