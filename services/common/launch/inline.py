"""Plain processes on this machine, without Ray."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from services.common.errors import MillraceError, WorkersLost
from services.common.launch import fork_server
from services.common.launch.fork_server import ForkedProcess, ForkServer
from services.common.launch.launcher import (
    LOOPBACK_INTERFACE,
    LostTask,
    R,
    T,
    TaskDemand,
    WorkerEnvironment,
    WorkerGroupSpec,
    name_the_cause,
)
from services.common.launch.neuron_environment import (
    NEURON_DEVICES,
    WorkerPlace,
    find_meeting_point,
    find_network,
    neuron_environment,
    require_every_core,
    set_neuron_environment,
)
from services.common.process.private_folder import new_name, private_folder
from services.common.process.stop_signals import STOP_SIGNALS, deferring_stop_signals

logger = logging.getLogger(__name__)

# spawn, not fork: the parent has threads (leases, progress) whose locks a fork would copy in a held state.
_CONTEXT = multiprocessing.get_context("spawn")

POLL_SECONDS = 1.0

_servers: list[ForkServer] = []
"""Of this process: none or one."""

Worker = tuple[BaseProcess | ForkedProcess, Connection]
"""And what it sends when it fails."""

_LOST = LostTask("a process of this machine was killed while it worked on a task")
LOOPBACK_ADDRESS = "127.0.0.1"


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. One worker means this process."""
    if num_workers == 1 or len(items) <= 1:
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    with ProcessPoolExecutor(num_workers, mp_context=_CONTEXT, initializer=_begin_tasks) as pool:
        waiting = list(enumerate(items))[::-1]
        running: dict[Future[R], int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < num_workers:
                    index, item = waiting.pop()
                    with _starting_processes():  # the pool starts them one by one
                        running[pool.submit(function, item)] = index
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise WorkersLost("a process of this machine was killed while it worked on a task") from error
        finally:
            if running:  # leaving early; the pool would wait for these tasks, which are idempotent and may take hours
                _stop(list(pool._processes.values()))


def run_tasks(
    function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
) -> Generator[tuple[T, R | LostTask] | None, None, None]:
    """See `Launcher.run_tasks`. A pool breaks as a whole: with a lost task go those that run beside it."""
    running: dict[Future[R], T] = {}
    pool: ProcessPoolExecutor | None = None
    try:
        while True:
            refused: list[T] = []
            while len(running) < num_workers and not refused and (taken := take()) is not None:
                pool = pool or ProcessPoolExecutor(num_workers, mp_context=_CONTEXT, initializer=_begin_tasks)
                try:
                    with _starting_processes():  # the pool starts them one by one
                        running[pool.submit(function, taken[0])] = taken[0]
                except BrokenProcessPool:  # a process was killed while it had nothing to do
                    refused.append(taken[0])
            if not running and not refused:
                return
            done, _ = wait(running, timeout=0 if refused else POLL_SECONDS, return_when=FIRST_COMPLETED)
            if refused or any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                done, _ = wait(running)
                assert pool is not None
                pool.shutdown()
                pool = None
            yield from [(running.pop(future), _result_of(future)) for future in done]
            yield from [(item, _LOST) for item in refused]
            if not done and not refused:
                yield None
    finally:
        if pool:
            if running:  # leaving early
                _stop(list(pool._processes.values()))
            pool.shutdown()


def has_room(demand: TaskDemand) -> bool:
    """See `Launcher.has_room`. CPUs are shared by whatever runs."""
    return demand.memory_bytes <= psutil.virtual_memory().total


def map_nodes(function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
    """See `Launcher.map_nodes`. This machine is the one node, and this process does its task."""
    yield socket.gethostname(), function(item)


def _result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        return _LOST


def prepare(spec: WorkerGroupSpec) -> None:
    """See `Launcher.prepare`. Workers that share their imports are forked from a process that has done them."""
    if not spec.preload or not fork_server.IS_SUPPORTED:
        return
    if _servers and not (_servers[0].is_alive and _servers[0].modules.issuperset(spec.preload)):
        _servers.pop().close()
    if not _servers:
        _servers.append(ForkServer(spec.preload))


def run_workers(function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec) -> None:
    """See `Launcher.run_workers`. Workers meet in a file, so no port is opened before the group forms."""
    prepare(spec)
    neuron_variables = _neuron_variables(spec)
    with private_folder(new_name("workers")) as folder:
        workers: list[Worker] = []
        try:
            for rank in range(spec.num_workers):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                environment = WorkerEnvironment(rank, spec.num_workers, "inline", str(folder / "rendezvous"), rank)
                variables = {"OMP_NUM_THREADS": str(spec.threads_per_worker), "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
                arguments = (function, argument, environment, variables, neuron_variables[rank])
                with sender:
                    if spec.preload and _servers:
                        _servers[0].fork(_work, arguments, sender, partial(_add, workers, receiver))
                        continue
                    process = _CONTEXT.Process(target=_work, args=(*arguments, sender), name=f"rank-{rank}")
                    with _starting_processes():
                        process.start()
                        workers.append((process, receiver))
            _wait_for_workers(workers)
        finally:
            _stop([process for process, _ in workers])


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. A single machine hears of it as SIGTERM."""
    return False


def _neuron_variables(spec: WorkerGroupSpec) -> list[dict[str, str]]:
    """Each worker's own; nothing where their devices are no NeuronCores."""
    if spec.device not in NEURON_DEVICES:
        return [{}] * spec.num_workers
    require_every_core(spec.device)
    size, meeting, network = spec.num_workers, find_meeting_point(LOOPBACK_ADDRESS), find_network(LOOPBACK_ADDRESS)
    places = [WorkerPlace(rank, size, rank, size, node_rank=0) for rank in range(size)]
    return [neuron_environment(spec.device, place, meeting, network, spec.logical_core_size) for place in places]


def _add(workers: list[Worker], receiver: Connection, process: ForkedProcess) -> None:
    workers.append((process, receiver))


def _wait_for_workers(workers: list[Worker]) -> None:
    pending = list(enumerate(workers))
    while pending:
        # Of a worker that fails, the message comes first: it may not fit into the pipe before somebody reads it.
        watched = [each for _, (process, receiver) in pending for each in (receiver, process.sentinel)]
        ready = wait_for_any(watched, timeout=POLL_SECONDS)
        ended = [(rank, worker) for rank, worker in pending if worker[1] in ready or worker[0].sentinel in ready]
        pending = [each for each in pending if each not in ended]
        raised, lost = [], None
        for rank, (process, receiver) in ended:
            error = _receive(receiver)
            if error is not None:
                raised.append(error)
                continue
            process.join()
            if process.exitcode != 0:
                lost = f"rank {rank} (pid {process.pid}) ended with {process.exitcode}"
        if raised or lost:
            raise name_the_cause(raised, lost)
        forked = [process for _, (process, _) in pending if isinstance(process, ForkedProcess)]
        if forked and not ready:
            _servers[0].require_answering(forked)


def _receive(receiver: Connection) -> Exception | None:
    """What an ended worker raised; a worker that returned, or was killed, has sent nothing, or not all of it."""
    try:
        error: Exception | None = receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        return None
    return error


def _work(
    function: Callable[[Any, WorkerEnvironment], None],
    argument: Any,
    environment: WorkerEnvironment,
    variables: dict[str, str],
    neuron_variables: dict[str, str],
    sender: Connection,
) -> None:
    # A signal to the whole group is for the parent, which lets the workers commit a checkpoint.
    _follow_parent(ignored=STOP_SIGNALS)
    os.environ.update(variables)
    try:
        if neuron_variables:
            set_neuron_environment(neuron_variables)
        function(argument, environment)
    except MillraceError as error:
        sender.send(error)
    except Exception as error:
        logger.exception("rank %d failed", environment.rank)
        sender.send(_portable(error))


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its pickling raises, the parent still has to learn of the failure
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _stop(processes: Sequence[BaseProcess | ForkedProcess]) -> None:
    """End what is left of a group: workers that lost a peer may be blocked in a collective for minutes."""
    for process in processes:
        process.kill()
        process.join()


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Processes that start inside have the stop signals blocked until `_follow_parent`: before that they import, and a
    signal would end them, with a traceback if it is Ctrl-C. This process gets its own signals when it has started them.
    """
    with deferring_stop_signals():
        # For the resource tracker too, which ends at SIGHUP, and whose start would lift the block of the others.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with redirect_stderr(io.StringIO()):  # a killed one would print tracebacks about what it tracked
                resource_tracker.ensure_running()
            resource_tracker.unregister = _unregister
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _unregister(name: Sized, rtype: str) -> None:
    """Let the resource tracker forget a semaphore, unless it was killed: another one in its place does not know it, and
    would print a traceback. What is left then, the command's guard removes.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None and tracker._check_alive():
        tracker.unregister(name, rtype)


def _begin_tasks() -> None:
    # SIGTERM is how a pool ends its processes when one of them was lost.
    _follow_parent(ignored=(signal.SIGINT,))


def _follow_parent(ignored: Sequence[signal.Signals]) -> None:
    """End this process when its parent dies, also by SIGKILL; leave the `ignored` signals to the parent.

    The kernel ends those that a fork server has started.
    """
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
