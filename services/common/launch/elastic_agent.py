"""Starts the workers of one node by torch's elastic agent, and starts them again where a worker was lost.

The agents of all nodes meet by torch's c10d rendezvous, and a loss on one node restarts the workers of all nodes.
Three things differ from `torchrun`: the caller decides about each start, a worker's fatal error ends the group
instead of restarting it, and workers are killed at once, because one that has lost a peer may wait for minutes.
"""

from __future__ import annotations

import logging
import os
import pickle  # nosec B403 # bytes that processes of the same command made
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.elastic.multiprocessing.api as torch_processes
from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import WorkerGroup as TorchGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from services.common.errors import AgentsLost, MillraceError, StorageError, WorkersLost
from services.common.launch import child_processes
from services.common.launch.child_processes import (
    follow_parent,
    kill_processes,
    start_fork_server,
    starting_processes,
)
from services.common.launch.launcher import (
    LOOPBACK_INTERFACE,
    ONLY_NODE,
    Node,
    WorkerEnvironment,
    WorkerGroup,
    WorkerGroupSpec,
    name_the_cause,
)
from services.common.launch.neuron_environment import (
    NEURON_DEVICES,
    find_free_port,
    find_network,
    join_address,
    neuron_environment,
    set_neuron_environment,
)
from services.common.process.entry_point import exit_code_for
from services.common.process.shutdown import STOP_SIGNALS, name_signal

logger = logging.getLogger(__name__)

MONITOR_SECONDS = 0.1
JOIN_SECONDS = 600
"""Seconds in which the agents of all nodes have to meet before a start."""
_RUN_ID = "millrace"
_FATAL = "fatal"
"""Key of the fatal error with which the group ended."""
_KILLED = "was killed by "
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_NEVER_SPENT = 2**31
"""Restarts that torch's agent has: `WorkerGroup.restart_policy` decides instead."""
_SHARES_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Torch's variable against a store that listens on all of a machine's addresses, which one node does not need."""


class GroupStart(NamedTuple):
    """One start of all workers, as the node with group rank 0 tells it to all nodes."""

    number: int
    time: float
    communicator_port: int
    """Free port of the node with group rank 0, for the Neuron runtime's communicator."""


def open_store(node: Node, send_port: Callable[[int], object], receive_address: Callable[[], tuple[str, int]]) -> Store:
    """Open the store of the agents' rendezvous on node 0, which sends its port, or connect to it from another node.

    Torch's store listens on all addresses of its machine.
    """
    limit = timedelta(seconds=JOIN_SECONDS)
    if node.rank == 0:
        store = TCPStore(node.address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        send_port(store.port)
        return store
    host, port = receive_address()
    return TCPStore(host, port, is_master=False, timeout=limit)


def run_node(group: WorkerGroup, node: Node = ONLY_NODE, store: Store | None = None) -> None:
    """Run the workers of this node until all workers of all nodes have returned; see `Launcher.run_workers`.

    `store` is the one by which the agents of several nodes meet. Has to be called in the main thread.
    """
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a traceback for each lost worker
    start_fork_server(group.spec.preload)
    with ExitStack() as opened:
        if group.spec.kept_folder:
            opened.callback(shutil.rmtree, Path(tempfile.gettempdir(), group.spec.kept_folder), ignore_errors=True)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="millrace-workers-")))
        if node.num_nodes == 1:
            os.environ[_SHARES_NO_STORE] = "1"
            opened.callback(os.environ.pop, _SHARES_NO_STORE)
        NodeAgent(group, node, store or HashStore(), folder).run_workers()


class NodeAgent(LocalElasticAgent):
    """The elastic agent of a node."""

    def __init__(self, group: WorkerGroup, node: Node, store: Store, folder: Path) -> None:
        """`folder` is on the node's disk and belongs to this agent."""
        self._group, self._node, self._folder, self._meeting_store = group, node, folder, store
        self._loss = node.loss
        self._start = GroupStart(0, 0.0, 0)
        self._rendezvous_handler = DynamicRendezvousHandler.from_backend(
            _RUN_ID,
            store,
            C10dRendezvousBackend(store, _RUN_ID),
            min_nodes=node.num_nodes,
            max_nodes=node.num_nodes,
            local_addr=node.address,
            timeout=RendezvousTimeout(join=timedelta(seconds=JOIN_SECONDS)),
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=group.spec.workers_of(node.rank, node.num_nodes),
            entrypoint=_work,
            rdzv_handler=self._rendezvous_handler,
            max_restarts=_NEVER_SPENT,
            monitor_interval=MONITOR_SECONDS,
        )
        method = child_processes.start_method(group.spec.preload)
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)), method, exit_barrier_timeout=60)

    def run_workers(self) -> None:
        """Run the workers, start them again after losses, and raise the fatal error with which they ended."""
        try:
            result = self.run()
        except (RendezvousError, DistError) as error:  # another node's agent has ended, or does not answer
            raise self._published_error() or AgentsLost(f"agents of the nodes lost connection: {error}") from error
        finally:
            self._rendezvous_handler.shutdown()
        if result is None or result.is_failed():
            raise self._published_error() or WorkersLost(self._loss)

    def _start_workers(self, worker_group: TorchGroup) -> dict[int, Any]:
        self._start = self._agree_on_start(worker_group)
        self._start_folder = self._folder / f"start-{self._start.number}"
        self._start_folder.mkdir()
        worker_group.spec.args = (
            self._group.work,
            self._group.spec,
            self._node,
            self._start,
            self._start_folder,
            dict(os.environ),
        )
        with starting_processes():
            before: dict[int, Any] = {each: signal.getsignal(each) for each in (*STOP_SIGNALS, signal.SIGQUIT)}
            # torch's own handler would take a signal that comes while workers start, and leave them behind. torch 2.13
            # has TORCHELASTIC_SIGNALS_TO_HANDLE against that, 2.9 has nothing.
            torch_processes._terminate_process_handler = lambda signum, frame: before[signum](signum, frame)
            try:
                return super()._start_workers(worker_group)
            finally:
                for signum, handler in before.items():  # torch has set its own
                    signal.signal(signum, handler)

    def _agree_on_start(self, worker_group: TorchGroup) -> GroupStart:
        """Return the start that the node with group rank 0 decides on, from what every node has lost.

        Raises the error with which that node ends the group instead.
        """
        store, rank = worker_group.store, worker_group.group_rank
        assert store is not None
        store.set(f"loss-{rank}", self._loss)
        if rank == 0:
            losses = [store.get(f"loss-{each}").decode() for each in range(worker_group.group_world_size)]
            store.set("start", pickle.dumps(self._decide_on_start(losses)))
        decided = pickle.loads(store.get("start"))  # nosec B301 # bytes of this command's node 0
        if isinstance(decided, Exception):
            self._publish_error(decided)
            raise decided
        self._loss = ""
        started: GroupStart = decided
        return started

    def _decide_on_start(self, losses: list[str]) -> GroupStart | MillraceError | OSError:
        # A worker that was killed explains the errors of its peers.
        loss = next((each for each in losses if _KILLED in each), next(filter(None, losses), ""))
        try:
            number = self._group.restart_policy(loss)
        except (MillraceError, OSError) as error:
            return error
        return GroupStart(number, time.time(), find_free_port(self._node.address))

    def _monitor_workers(self, worker_group: TorchGroup) -> RunResult:
        processes = self._pcontext._pc.processes  # type: ignore[union-attr]
        workers = {worker.global_rank: processes[worker.local_rank] for worker in worker_group.workers}
        if ended := [rank for rank, process in workers.items() if process.exitcode]:
            kill_processes(processes)  # torch's SIGTERM leaves a frozen one for 30 s
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            dead = {rank: workers[rank] for rank in ended or result.failures}
            cause = name_the_cause(self._read_errors(dead), self._describe_dead(dead))
            if isinstance(cause, WorkersLost):
                self._loss = str(cause)
            else:
                self._publish_error(cause)
            if self._published_error():
                self._remaining_restarts = 0
        return result

    def _shutdown(self, *arguments: object, **options: object) -> None:
        """Kill the workers; see the module's docstring."""
        if self._pcontext:
            self._pcontext.close(signal.SIGKILL)

    def _describe_dead(self, dead: dict[int, BaseProcess]) -> str | None:
        """Describe a worker of these that ended without an error of its own, by a signal if one did."""
        for rank, process in sorted(dead.items(), key=lambda each: each[1].exitcode or 0):
            if not (self._start_folder / error_name(rank)).exists():
                who, code = f"rank {rank} (pid {process.pid} on {socket.gethostname()})", process.exitcode or 0
                return f"{who} {_KILLED}{name_signal(-code)}" if code < 0 else f"{who} ended with {code}"
        return None

    def _read_errors(self, dead: dict[int, BaseProcess]) -> list[Exception]:
        """Return what the node's workers of this start have raised; a full disk may leave the exit code alone."""
        files = self._start_folder.glob(error_name("*"))
        errors = [pickle.loads(file.read_bytes()) for file in files]  # nosec B301 # bytes of own workers
        full = [rank for rank, process in dead.items() if process.exitcode == StorageError.exit_code]
        unsaid = [rank for rank in full if not (self._start_folder / error_name(rank)).exists()]
        return errors + [StorageError(f"rank {rank} could not write; its log says where and why") for rank in unsaid]

    def _publish_error(self, error: BaseException) -> None:
        """Tell all nodes why the group ends; the first such error counts."""
        with suppress(DistError):  # node 0 has ended already
            if not self._meeting_store.check([_FATAL]):
                self._meeting_store.set(_FATAL, pickle.dumps(error))  # type: ignore[arg-type]

    def _published_error(self) -> Exception | None:
        with suppress(DistError):
            if self._meeting_store.check([_FATAL]):
                end: Exception = pickle.loads(self._meeting_store.get(_FATAL))  # nosec B301 # bytes of this command
                return end
        return None


def error_name(rank: object) -> str:
    """Return the name of the file in which a worker leaves the error that it raised."""
    return f"rank-{rank}.error"


def _work(
    work: bytes, spec: WorkerGroupSpec, node: Node, start: GroupStart, folder: Path, variables: dict[str, str]
) -> None:
    """Run a pickled function and its argument as the worker that torch's variables name.

    `folder` is on the node's disk and belongs to this start of the workers.
    """
    # A signal to the command's process group reaches the command alone. One to all processes of a container, as of
    # systemd, has to leave workers the time for a checkpoint. SIGINT is what torch has the kernel send at the end of
    # the fork server.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    follow_parent(ignored=[signum for signum in STOP_SIGNALS if signum != signal.SIGINT])
    given = {name: os.environ[name] for name in _TORCH_VARIABLES}
    os.environ.update(variables | given | {"OMP_NUM_THREADS": str(spec.threads_per_worker)})
    host, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    environment = WorkerEnvironment(
        int(given["RANK"]),
        int(given["WORLD_SIZE"]),
        # Workers of one node meet in a file, so that no port is opened before the group forms.
        str(folder / "store") if node.num_nodes == 1 else f"tcp://{join_address(host, port)}/{folder.name}",
        local_rank=int(given["LOCAL_RANK"]),
        local_world_size=int(given["LOCAL_WORLD_SIZE"]),
        node_rank=int(given["GROUP_RANK"]),
        start_number=start.number,
        started_at=start.time,
    )
    try:
        if node.num_nodes == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
        if spec.device in NEURON_DEVICES:
            network = find_network(node.address)
            root = join_address(host, start.communicator_port)
            set_neuron_environment(neuron_environment(spec, environment, root, network))
        function, argument = pickle.loads(work)  # nosec B301 # bytes that the command made
        function(argument, environment)
    except Exception as error:
        if not isinstance(error, MillraceError):
            logger.exception("rank %d failed", environment.rank)
        file = folder / error_name(environment.rank)
        with suppress(OSError):  # a full disk, which the exit code tells
            file.with_suffix(".partial").write_bytes(_portable(error))
            file.with_suffix(".partial").rename(file)
        logging.shutdown()
        os._exit(exit_code_for(error))


def _portable(error: Exception) -> bytes:
    """Pickle an error. One that cannot be pickled, or not be loaded again, becomes a `RuntimeError` with its text."""
    try:
        pickle.loads(packed := pickle.dumps(error))  # nosec B301 # bytes that this process made
    except Exception:  # noqa: BLE001 - pickling can raise anything, and the command has to learn of the failure
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed
