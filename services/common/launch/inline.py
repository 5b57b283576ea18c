"""The launcher `inline`, which runs tasks and workers as processes of this machine, without Ray."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any

import psutil

from services.common.errors import WorkersLost
from services.common.launch.child_processes import SPAWN, follow_parent, kill_processes, starting_processes
from services.common.launch.launcher import LostTask, R, T, TaskDemand, WorkerGroup
from services.common.launch.neuron_environment import require_every_core
from services.common.process.shutdown import STOP_SIGNALS

# Only for `keep_processes`, which forks before the command has threads of its own.
_FORK = multiprocessing.get_context("fork")
_kept_pools: list[ProcessPoolExecutor] = []
"""The pool of `keep_processes`, if there is one."""

POLL_SECONDS = 1.0

_LOST = LostTask("a process of this machine was killed while it worked on a task")


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. With one worker the tasks run in this process."""
    if num_workers == 1 or len(items) <= 1:
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    with _pool_of(num_workers) as pool:
        waiting = enumerate(items)
        running: dict[Future[R], int] = {}
        # The pool's queue holds the next task of each process, which would otherwise wait 2 ms for this process.
        most_submitted = num_workers if len(pool._processes) > num_workers else 2 * num_workers
        try:
            while True:
                for index, item in islice(waiting, most_submitted - len(running)):
                    with starting_processes():  # the pool starts them one by one
                        running[pool.submit(function, item)] = index
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise WorkersLost(_LOST.reason) from error
        finally:
            if running:  # after an error; the pool would wait for these tasks, which may take hours
                kill_processes(list(pool._processes.values()))


@contextmanager
def keep_processes(num_workers: int) -> Iterator[None]:
    """See `Launcher.keep_processes`. The processes are forked where that is safe, and start within milliseconds.

    A process that is forked has imported everything that this one has; a process that is spawned takes half a second
    for that. So a second process is never slower than none.
    """
    if num_workers == 1 or not _can_fork():
        yield
        return
    with ProcessPoolExecutor(num_workers, mp_context=_FORK, initializer=_init_forked) as pool:
        with starting_processes():
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
    with ProcessPoolExecutor(num_workers, mp_context=SPAWN, initializer=_init_tasks) as pool:
        yield pool


def _can_fork() -> bool:
    """Whether a fork of this process is safe: no other thread may hold a lock."""
    return sys.platform == "linux" and threading.enumerate() == [threading.main_thread()]


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
            while len(running) < num_workers and (taken := take()) is not None:
                pool = pool or ProcessPoolExecutor(num_workers, mp_context=SPAWN, initializer=_init_tasks)
                try:
                    with starting_processes():  # the pool starts them one by one
                        running[pool.submit(function, taken[0])] = taken[0]
                except BrokenProcessPool as error:  # a process was killed while it was idle
                    lost = Future[R]()
                    lost.set_exception(error)
                    running[lost] = taken[0]
                    break
            if not running:
                return
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                done, _ = wait(running)
                assert pool is not None
                pool.shutdown()
                pool = None
            yield from [(running.pop(future), _result_of(future)) for future in done]
            if not done:
                yield None
    finally:
        if pool:
            if running:  # after an error
                kill_processes(list(pool._processes.values()))
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


def run_workers(group: WorkerGroup) -> None:
    """See `Launcher.run_workers`. The command is itself the agent of its machine, and needs no Ray."""
    require_every_core(group.spec.device)
    agent: Any = importlib.import_module("services.common.launch.elastic_agent")  # stages without workers have no torch
    agent.run_node(group)


def _init_forked() -> None:
    for signum in STOP_SIGNALS:  # a fork has copied the command's handlers
        signal.signal(signum, signal.SIG_DFL)
    _init_tasks()


def _init_tasks() -> None:
    # Not SIGTERM, with which a pool ends its processes when one of them was lost.
    follow_parent(ignored=(signal.SIGINT,))
