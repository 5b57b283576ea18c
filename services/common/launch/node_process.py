"""Runs a node's elastic agent in a process of its own, which Ray Train's worker on the node starts.

Ray runs its function in a thread, where no signal handler can be set, and its process has modules that workers must not
inherit. Both ends hold one socket: when the worker's end closes, however it ended, the agent and its workers end.
"""

from __future__ import annotations

import os
import pickle  # nosec B403 # bytes that processes of the same command made
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil

from services.common.errors import WorkersLost
from services.common.launch.child_processes import start_fork_server
from services.common.process.shutdown import STOP_SIGNALS

if TYPE_CHECKING:
    from services.common.launch.launcher import Node, WorkerGroup

END_SECONDS = 10.0


class NodeProcess:
    """The process, as Ray Train's worker holds it. The context ends it, and the workers that it has started."""

    def __init__(self, group: WorkerGroup, node: Node) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            main = f"from services.common.launch.node_process import main; main({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                env=_own_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(group.spec.preload)
        self._connection.send((group, node))

    def receive_port(self) -> int:
        """Return the port of the store by which agents meet, which the process of node 0 opens."""
        return int(self._receive())

    def send_address(self, host: str, port: int) -> None:
        """Send the process of another node the address of that store."""
        self._connection.send((host, port))

    def has_ended(self, within_seconds: float) -> bool:
        """Whether the agent has ended, or the process is gone: then `outcome` says how."""
        return self._connection.poll(within_seconds)

    def outcome(self) -> Exception | None:
        """Return the error with which the agent has ended; None where all workers have returned.

        Raises `WorkersLost` where the process was killed.
        """
        outcome: Exception | None = pickle.loads(self._receive())  # nosec B301 # bytes of own process
        return outcome

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            code = self._process.wait()
            raise WorkersLost(f"the agent of {socket.gethostname()} ended with {code}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()


def main(descriptor: int) -> None:
    """Run the agent for the worker at the other end of this socket."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # a stop reaches workers by the run's stop file
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    with Connection(descriptor) as connection:
        start_fork_server(connection.recv())
        group, node = connection.recv()
        connection.send(pickle.dumps(_run(connection, group, node)))


def _run(connection: Connection, group: WorkerGroup, node: Node) -> Exception | None:
    from services.common.launch.elastic_agent import open_store, run_node  # noqa: PLC0415 - imports torch, while workers' server does

    try:
        store = open_store(node, connection.send, connection.recv) if node.num_nodes > 1 else None
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        run_node(group, node, store)
    except Exception as error:  # noqa: BLE001 - the command raises it
        return error
    return None


def _end_with(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    for process in psutil.Process().children(recursive=True):  # a frozen worker does not notice
        with suppress(psutil.Error):
            if "resource_tracker" not in " ".join(process.cmdline()):  # it removes semaphores, and ends by itself
                process.kill()
    os._exit(1)


def _own_environment() -> dict[str, str]:
    """This process's environment, without Ray's folder of libraries in PYTHONPATH, which hide the project's own."""
    import ray  # noqa: PLC0415 - the agent itself does without

    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [folder for folder in folders if not Path(folder).is_relative_to(Path(ray.__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(own)}
