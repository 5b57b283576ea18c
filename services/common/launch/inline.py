"""The launcher `inline`: processes of this machine, without Ray."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle  # nosec B403 # only this process's own bytes are loaded
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from services.common.errors import MillraceError, WorkersLost
from services.common.launch import fork_server
from services.common.launch.guard import GUARD_THREAD
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
from services.common.process.stop_signals import STOP_SIGNALS, deferring_stop_signals, name_signal

logger = logging.getLogger(__name__)

# spawn, not fork: the command has threads (leases, progress), and a fork would copy locks that they hold. Only
# `keep_processes` forks, before these threads start.
_CONTEXT = multiprocessing.get_context("spawn")

_FORK = multiprocessing.get_context("fork")
_kept_pools: list[ProcessPoolExecutor] = []
"""The pool of `keep_processes`, if there is one."""

POLL_SECONDS = 1.0

_FORKING_CONTEXT = fork_server.ForkContext()

Worker = tuple[BaseProcess, Connection]
"""A worker's process, and the connection by which it sends the error that it raises."""

_EXIT_CODE_UNKNOWN = 255
"""Exit code that `multiprocessing` gives to a forked process whose server was killed."""

_LOST = LostTask("a process of this machine was killed while it worked on a task")
LOOPBACK_ADDRESS = "127.0.0.1"


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. With one worker the tasks run in this process."""
    if num_workers == 1 or len(items) <= 1:
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    with _pool_of(num_workers) as pool:
        waiting = enumerate(items)
        running: dict[Future[R], int] = {}
        try:
            while True:
                for index, item in islice(waiting, num_workers - len(running)):
                    with _starting_processes():  # the pool starts them one by one
                        running[pool.submit(function, item)] = index
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise WorkersLost("a process of this machine was killed while it worked on a task") from error
        finally:
            if running:  # after an error; the pool would wait for these tasks, which may take hours
                _stop(list(pool._processes.values()))


@contextmanager
def keep_processes(num_workers: int) -> Iterator[None]:
    """See `Launcher.keep_processes`. The processes are forked where that is safe, and start within milliseconds.

    A process that is forked has imported everything that this one has; a process that is spawned takes half a second
    for that. So a second process is never slower than none.
    """
    if num_workers == 1 or not _can_fork():
        yield
        return
    with ProcessPoolExecutor(num_workers, mp_context=_FORK, initializer=_begin_forked, initargs=(os.getpid(),)) as pool:
        with _starting_processes():
            pool.submit(os.getpid)  # starts all processes: later there are threads that a fork would not copy
        _kept_pools.append(pool)
        try:
            yield
        finally:
            _kept_pools.remove(pool)


@contextmanager
def _pool_of(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """The pool of the processes that are kept, or a new one."""
    if _kept_pools:
        yield _kept_pools[-1]
        return
    with ProcessPoolExecutor(num_workers, mp_context=_CONTEXT, initializer=_begin_tasks) as pool:
        yield pool


def _can_fork() -> bool:
    """Whether a fork of this process is safe: no other thread may hold a lock, and the guard's only waits."""
    others = {thread.name for thread in threading.enumerate()} - {threading.main_thread().name, GUARD_THREAD}
    return fork_server.IS_SUPPORTED and not others and threading.current_thread() is threading.main_thread()


def map_on_nodes(function: Callable[[T], R], items: Sequence[T], tasks_per_node: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_on_nodes`. This machine is the only node, and its tasks run in this process, one by one."""
    yield from ((index, function(item)) for index, item in enumerate(items))


def run_tasks(
    function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
) -> Generator[tuple[T, R | LostTask] | None, None, None]:
    """See `Launcher.run_tasks`. When a process of the pool dies, every task that runs beside it is lost too."""
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
                except BrokenProcessPool:  # a process was killed while it was idle
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
            if running:  # after an error
                _stop(list(pool._processes.values()))
            pool.shutdown()


def has_room(demand: TaskDemand) -> bool:
    """See `Launcher.has_room`. Only memory counts: the operating system shares CPUs among processes."""
    return demand.memory_bytes <= psutil.virtual_memory().total


def map_nodes(function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
    """See `Launcher.map_nodes`. This machine is the only node, and its task runs in this process."""
    yield socket.gethostname(), function(item)


def _result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        return _LOST


def prepare(spec: WorkerGroupSpec) -> None:
    """See `Launcher.prepare`. Starts the server from which workers with a `preload` are forked."""
    if not spec.preload or not fork_server.IS_SUPPORTED:
        return
    with _starting_processes():
        fork_server.start_server(spec.preload)


def run_workers(function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec) -> None:
    """See `Launcher.run_workers`. Workers meet in a file, so that no port is opened before the group forms."""
    prepare(spec)
    context = _FORKING_CONTEXT if spec.preload and fork_server.IS_SUPPORTED else _CONTEXT
    neuron_variables = _neuron_variables(spec)
    with private_folder(new_name("workers")) as folder:
        workers: list[Worker] = []
        try:
            for rank in range(spec.num_workers):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                environment = WorkerEnvironment(
                    rank,
                    spec.num_workers,
                    "inline",
                    str(folder / "rendezvous"),
                    local_rank=rank,
                    local_world_size=spec.num_workers,
                    node_folder=folder,
                )
                variables = {"OMP_NUM_THREADS": str(spec.threads_per_worker), "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
                arguments = (function, argument, environment, variables, neuron_variables[rank])
                process = context.Process(target=_work, args=(*arguments, sender), name=f"rank-{rank}")
                with sender, _starting_processes():
                    _start(process)
                    workers.append((process, receiver))
            _wait_for_workers(workers)
        finally:
            _stop([process for process, _ in workers])


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. Always False: a single machine is told of preemption by SIGTERM."""
    return False


def _neuron_variables(spec: WorkerGroupSpec) -> list[dict[str, str]]:
    """Neuron's environment variables of every worker; empty where the workers' devices are not NeuronCores."""
    if spec.device not in NEURON_DEVICES:
        return [{}] * spec.num_workers
    require_every_core(spec.device)
    size, meeting, network = spec.num_workers, find_meeting_point(LOOPBACK_ADDRESS), find_network(LOOPBACK_ADDRESS)
    places = [WorkerPlace(rank, size, rank, size, node_rank=0) for rank in range(size)]
    return [neuron_environment(spec.device, place, meeting, network, spec.logical_core_size) for place in places]


def _start(process: BaseProcess) -> None:
    """Start the process. Raises `WorkersLost` where the fork server was killed meanwhile."""
    try:
        process.start()
    except (EOFError, ConnectionError) as error:
        raise WorkersLost("the process that workers are forked from was killed before it forked one") from error


def _wait_for_workers(workers: list[Worker]) -> None:
    pending = list(enumerate(workers))
    while pending:
        # A worker that fails sends its error before it ends: a long one fits into the pipe only while somebody reads.
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
            if process.exitcode == _EXIT_CODE_UNKNOWN:
                lost = f"rank {rank} (pid {process.pid}) was killed with the process that workers are forked from"
            elif process.exitcode != 0:
                lost = f"rank {rank} (pid {process.pid}) {_describe_end(process.exitcode)}"
        if raised or lost:
            raise name_the_cause(raised, lost)


def _describe_end(exit_code: int | None) -> str:
    """Describe the end of a process by its exit code, which is the negative number of the signal that killed it."""
    if exit_code is not None and -exit_code in set(signal.Signals):
        return f"was killed by {name_signal(-exit_code)}"
    return f"ended with {exit_code}"


def _receive(receiver: Connection) -> Exception | None:
    """The error that a worker sent; None for a worker that returned, or was killed before it had sent all of it."""
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
    # Workers ignore stop signals: the parent acts on a signal to the process group, and asks for a checkpoint.
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
        pickle.loads(pickle.dumps(error))  # nosec B301 # bytes that this process made
    except Exception:  # noqa: BLE001 - pickling can raise anything, and the parent has to learn of the failure
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _stop(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that still run: workers that lost a peer may be blocked in a collective for minutes."""
    for process in processes:
        process.kill()
        process.join()


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Block the stop signals in processes that start inside the block, until they call `_follow_parent`: while they
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


def _unregister(name: Sized, rtype: str) -> None:
    """Let the resource tracker forget a semaphore, unless the tracker was killed: its successor does not know the
    semaphore and would print a traceback. The command's guard removes such semaphores.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None and tracker._check_alive():
        tracker.unregister(name, rtype)


def _begin_forked(parent: int) -> None:
    """Leave what belongs to the command: its guard hears of the command's signals by the descriptor for wake-ups."""
    signal.set_wakeup_fd(-1)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    fork_server.end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _begin_tasks() -> None:
    # Not SIGTERM, with which a pool ends its processes when one of them was lost.
    _follow_parent(ignored=(signal.SIGINT,))


def _follow_parent(ignored: Sequence[signal.Signals]) -> None:
    """End this process when the command dies, also by SIGKILL, and leave the `ignored` signals to the command."""
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
