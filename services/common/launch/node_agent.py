"""The agent of a node, which starts the node's workers, watches them, and kills all of them where one fails.

With the launcher `inline` the command is itself the agent of its machine. Another launcher starts one agent on each
node (`agent_process`), and the command controls the agents (`agent_group`).
"""

from __future__ import annotations

import logging
import os
import pickle  # nosec B403 # bytes that the command and its workers made
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from services.common.errors import MillraceError, WorkersLost
from services.common.launch import fork_server
from services.common.launch.child_processes import SPAWN, follow_parent, kill_processes, starting_processes
from services.common.launch.launcher import (
    LOOPBACK_INTERFACE,
    WorkerEnvironment,
    WorkerGroupSpec,
    name_the_cause,
)
from services.common.launch.neuron_environment import (
    NEURON_DEVICES,
    MeetingPoint,
    find_network,
    neuron_environment,
    set_neuron_environment,
)
from services.common.process.private_folder import new_name, private_folder
from services.common.process.stop_signals import STOP_SIGNALS, name_signal

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LOOPBACK_ADDRESS = "127.0.0.1"
_EXIT_CODE_UNKNOWN = 255
"""Exit code that `multiprocessing` gives to a forked process whose server was killed."""

_FORK_SERVER = fork_server.ForkContext()


@dataclass(frozen=True)
class NodeStart:
    """Describes one start of a node's workers to the node's agent."""

    work: bytes
    """The pickled function of the workers and its argument. Only workers load them, because loading imports modules."""
    spec: WorkerGroupSpec
    node_rank: int
    num_nodes: int
    meeting: MeetingPoint
    """Address and ports of the node with rank 0, which are new for each start."""

    @property
    def ranks(self) -> range:
        """Ranks of the node's workers. Only the last node has fewer workers than the others."""
        size = self.spec.num_workers if self.num_nodes == 1 else self.spec.workers_per_node
        return range(self.spec.num_workers)[self.node_rank * size : (self.node_rank + 1) * size]


@dataclass(frozen=True)
class NodeEnd:
    """Tells how the workers of a node ended. All have returned where none raised an error and none was lost."""

    raised: tuple[bytes, ...] = ()
    """The pickled errors of the workers: to load an error may import the library that defines its type."""
    lost: str | None = None
    """Names a worker that died without an error."""

    @property
    def is_failure(self) -> bool:
        return bool(self.raised or self.lost)


def require_success(ends: Iterable[NodeEnd]) -> None:
    """Raise the error that explains why the workers of some nodes failed; see `name_the_cause`."""
    failed = [end for end in ends if end.is_failure]
    if failed:
        raised = [pickle.loads(error) for end in failed for error in end.raised]  # nosec B301 # bytes of own workers
        raise name_the_cause(raised, next((end.lost for end in failed if end.lost), None))


class _Worker(NamedTuple):
    rank: int
    process: BaseProcess
    errors: Connection
    """Connection by which the worker sends the error that it raises."""


class NodeAgent:
    """Starts the workers of one node, as often as asked. All methods have to be called in the main thread."""

    def __init__(self, address: str = LOOPBACK_ADDRESS) -> None:
        """Other nodes reach this node at `address`."""
        self._address = address
        self._started: list[_Worker] = []
        self._running: list[_Worker] = []
        self._raised: list[bytes] = []
        self._lost: str | None = None
        self._folders, self._kept_folders = ExitStack(), ExitStack()
        self._kept_name = ""

    @property
    def has_failed(self) -> bool:
        """Whether one of the workers has raised an error or was lost."""
        return bool(self._raised or self._lost)

    def start(self, start: NodeStart) -> None:
        """Start the workers. An error of the start counts as the error of a worker, which `end` returns."""
        try:
            self._start(start)
        except Exception as error:  # noqa: BLE001 - the command raises it
            self._raised.append(_portable(error))

    def _start(self, start: NodeStart) -> None:
        """Start the workers. Raises `WorkersLost` where the fork server was killed meanwhile."""
        spec, ranks = start.spec, start.ranks
        context = prepare_fork_server(spec.preload)
        if spec.kept_folder != self._kept_name:
            self._kept_folders.enter_context(private_folder(spec.kept_folder))
            self._kept_name = spec.kept_folder
        folder = self._folders.enter_context(private_folder(new_name("workers")))
        # Workers of one node meet in a file, so that no port is opened before the group forms.
        rendezvous = str(folder / "rendezvous") if start.num_nodes == 1 else start.meeting.url
        network = find_network(self._address) if spec.device in NEURON_DEVICES else None
        on_loopback = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE} if start.num_nodes == 1 else {}
        variables = {"OMP_NUM_THREADS": str(spec.threads_per_worker), **on_loopback}
        for local_rank, rank in enumerate(ranks):
            environment = WorkerEnvironment(
                rank,
                spec.num_workers,
                rendezvous,
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=start.node_rank,
                num_nodes=start.num_nodes,
                node_folder=folder,
            )
            of_neuron = neuron_environment(spec, environment, start.meeting, network) if network else {}
            receiver, sender = SPAWN.Pipe(duplex=False)
            arguments = (start.work, environment, variables, of_neuron, sender)
            process = context.Process(target=_work, args=arguments, name=f"rank-{rank}")
            with sender, starting_processes():
                _start_process(process, spec.preload)
                self._started.append(_Worker(rank, process, receiver))
        self._running = list(self._started)

    def wait(self, others: Sequence[Connection] = ()) -> bool:
        """Wait until all workers have returned or one has failed, or one of the `others` has something to read.

        Return whether the workers are to be ended now. A worker's death is noticed at once: its process is watched.
        """
        while self._running and not self.has_failed:
            self._collect(ready := wait_for_any([*others, *self._watched()], timeout=POLL_SECONDS))
            if any(other in ready for other in others):
                break
        return self.has_failed or not self._running

    def end(self) -> NodeEnd:
        """Kill the workers that still run, remove their folder, and return how the workers ended that had ended before.

        Returns once no worker's process is left, so that the next start may follow.
        """
        self._collect(wait_for_any(self._watched(), timeout=0))
        kill_processes([worker.process for worker in self._started])
        end = NodeEnd(tuple(self._raised), self._lost)
        self._folders.close()
        self._started, self._running, self._raised, self._lost = [], [], [], None
        return end

    def close(self) -> None:
        """Kill the workers that still run, and leave the folder that this node has kept for them."""
        self.end()
        self._kept_folders.close()

    def _watched(self) -> list[Any]:
        # A worker that fails sends its error before it ends: a long one fits into the pipe only while somebody reads.
        return [each for worker in self._running for each in (worker.errors, worker.process.sentinel)]

    def _collect(self, ready: Sequence[object]) -> None:
        """Note how workers have ended: those whose connection or process is `ready`."""
        ended = [each for each in self._running if each.errors in ready or each.process.sentinel in ready]
        self._running = [each for each in self._running if each not in ended]
        for worker in ended:
            error = _receive(worker.errors)
            if error is not None:
                self._raised.append(error)
                continue
            worker.process.join()
            if worker.process.exitcode != 0:
                how = _describe_end(worker.process.exitcode)
                self._lost = f"rank {worker.rank} (pid {worker.process.pid} on {socket.gethostname()}) {how}"


def _start_process(process: BaseProcess, preload: tuple[str, ...]) -> None:
    """Start a process. A fork server that was killed just now is replaced once; a second loss raises `WorkersLost`."""
    try:
        process.start()
        return
    except (EOFError, ConnectionError):
        fork_server.replace_server(preload)
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        raise WorkersLost("the process that workers are forked from was killed before a fork") from error


def prepare_fork_server(preload: Sequence[str]) -> fork_server.ForkContext | SpawnContext:
    """Return the context of workers with this `preload`. A fork server, where they need one, is started and imports."""
    if not preload or not fork_server.IS_SUPPORTED:
        return SPAWN
    with starting_processes():
        fork_server.start_server(preload)
    return _FORK_SERVER


def _describe_end(exit_code: int | None) -> str:
    """Describe the end of a process by its exit code, which is the negative number of the signal that killed it."""
    if exit_code == _EXIT_CODE_UNKNOWN:
        return "was killed with the process that workers are forked from"
    if exit_code is not None and -exit_code in set(signal.Signals):
        return f"was killed by {name_signal(-exit_code)}"
    return f"ended with {exit_code}"


def _receive(errors: Connection) -> bytes | None:
    """The error that a worker sent; None for a worker that returned, or was killed before it had sent all of it."""
    try:
        return errors.recv_bytes() if errors.poll() else None
    except (EOFError, OSError):
        return None


def _work(
    work: bytes,
    environment: WorkerEnvironment,
    variables: dict[str, str],
    neuron_variables: dict[str, str],
    sender: Connection,
) -> None:
    # Workers ignore stop signals: the parent acts on a signal to the process group, and asks for a checkpoint.
    follow_parent(ignored=STOP_SIGNALS)
    os.environ.update(variables)
    try:
        if neuron_variables:
            set_neuron_environment(neuron_variables)
        function, argument = pickle.loads(work)  # nosec B301 # bytes that the command made
        function(argument, environment)
    except MillraceError as error:
        sender.send_bytes(pickle.dumps(error))
    except Exception as error:
        logger.exception("rank %d failed", environment.rank)
        sender.send_bytes(_portable(error))


def _portable(error: Exception) -> bytes:
    """Pickle an error. One that cannot be pickled, or not be loaded again, becomes a `RuntimeError` with its text."""
    try:
        pickle.loads(packed := pickle.dumps(error))  # nosec B301 # bytes that this process made
    except Exception:  # noqa: BLE001 - pickling can raise anything, and the command has to learn of the failure
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed
