"""The launcher `ray`: Ray tasks for work that splits, and Ray Train for workers that form a group."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

import ray
import ray.exceptions
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.common.errors import MillraceError, TryAgain, WorkersLost
from services.common.launch import inline
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import NODE_SECONDS, LostTask, R, T, TaskDemand, WorkerGroup
from services.common.launch.ray_cluster import connect
from services.common.launch.ray_placement import (
    POLL_SECONDS,
    TASK_SHARE,
    capacities_for,
    nodes_of_stage,
    require_own_node,
    share_of_group,
    wait_for_room,
)
from services.common.process.shutdown import deferring_stop_signals

LOST_BY_RAY = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.TaskUnschedulableError,
)
"""Errors of Ray for a task whose process or node was lost, and which Ray does not run again."""


def run_workers(group: WorkerGroup) -> None:
    """See `Launcher.run_workers`."""
    engine: Any = importlib.import_module("services.common.launch.ray_train")  # stages without workers have no torch
    with raising_causes("the workers"):
        engine.run_workers(group)


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. Ray runs a task up to three times more when its process or node was lost."""
    connect(num_workers)
    group = wait_for_room({"CPU": 1.0})
    remote = ray.remote(max_retries=3, num_cpus=1, resources=group)(function)
    waiting = enumerate(items)
    running: dict[ray.ObjectRef[Any], int] = {}
    with _ending_tasks(running):
        while True:
            with deferring_stop_signals():
                for index, item in islice(waiting, num_workers - len(running)):
                    running[remote.remote(item)] = index
                if not running:
                    return
                results = [(running.pop(reference), ray.get(reference)) for reference in _wait_for_ended(running)]
            yield from results


def map_on_nodes(function: Callable[[T], R], items: Sequence[T], tasks_per_node: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_on_nodes`. The tasks take none of Ray's resources, of which workers may have taken all."""
    connect(1)
    free = [node["NodeID"] for node in nodes_of_stage()] * tasks_per_node
    remote = ray.remote(max_retries=0, num_cpus=0)(function)
    waiting = list(enumerate(items))[::-1]
    running: dict[ray.ObjectRef[Any], tuple[int, str]] = {}
    with _ending_tasks(running):
        while waiting or running:
            with deferring_stop_signals():
                while waiting and free:
                    (index, item), node = waiting.pop(), free.pop()
                    place = NodeAffinitySchedulingStrategy(node, soft=False)
                    running[remote.options(scheduling_strategy=place).remote(item)] = index, node
                results = [(*running.pop(reference), ray.get(reference)) for reference in _wait_for_ended(running)]
            for index, node, result in results:
                free.append(node)
                yield index, result


def _wait_for_ended(running: Mapping[ray.ObjectRef[Any], object]) -> list[ray.ObjectRef[Any]]:
    """Return all tasks that have ended, after a wait of at most POLL_SECONDS where none has.

    Ray's wait takes time for each running task, 0.8 ms for 4,000. So tasks that have ended together share one call.
    """
    references = list(running)
    first, others = ray.wait(references, num_returns=1, timeout=POLL_SECONDS)
    if not first:
        require_own_node()
    if not first or not others:
        return list(first)
    return [*first, *ray.wait(others, num_returns=len(others), timeout=0)[0]]


@contextmanager
def _ending_tasks(running: Mapping[ray.ObjectRef[Any], object]) -> Iterator[None]:
    """Raise the own error of a failed task, and `WorkersLost` for a lost one; cancel tasks that are still running."""
    try:
        with raising_causes("a task"):
            yield
    finally:
        with deferring_stop_signals(), suppress(ray.exceptions.RayError):  # such as of a Ray that is lost
            for reference in running:
                ray.cancel(reference, force=True)


@contextmanager
def raising_causes(name: str) -> Iterator[None]:
    """Replace an error of Ray: by the error that the task raised, `WorkersLost` where the task was lost, or `TryAgain`
    where Ray itself was.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MillraceError | OSError) else error) from None
    except LOST_BY_RAY as error:
        raise WorkersLost(f"Ray lost {name}: {explain_lost_task(error)}") from error
    except ray.exceptions.RayError as error:
        raise TryAgain(f"Ray was lost: {error}. Run the same command again: it continues committed work.") from error


def explain_lost_task(error: BaseException) -> str:
    """Return Ray's reason in one line."""
    return " ".join(str(error).split())[:200]


def keep_processes(num_workers: int) -> AbstractContextManager[None]:
    """See `Launcher.keep_processes`. Ray keeps its processes by itself."""
    return nullcontext()


def run_tasks(
    function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
) -> Generator[tuple[T, R | LostTask] | None, None, None]:
    """See `Launcher.run_tasks`. Ray does not run a lost task again: the caller may want to change its demand."""
    running: dict[ray.ObjectRef[Any], T] = {}
    remote = ray.remote(max_retries=0)(function)  # made once: workers would load every new remote function again
    placed: dict[TaskDemand, Any] = {}
    with _ending_tasks(running):
        while True:
            while len(running) < num_workers and (taken := take()) is not None:
                item, demand = taken
                connect(num_workers * demand.num_cpus)
                if demand not in placed:
                    resources = _resources_of(demand)
                    group, memory = wait_for_room(resources), resources.get("memory")
                    placed[demand] = remote.options(num_cpus=demand.num_cpus, memory=memory, resources=group)
                with deferring_stop_signals():
                    running[placed[demand].remote(item)] = item
            if not running:
                return
            results = _take_ended(running)
            yield from results
            if not results:
                yield None


def has_room(demand: TaskDemand) -> bool:
    """See `Launcher.has_room`."""
    if cluster_address() is None:
        return inline.has_room(demand)
    return any(capacities_for(_resources_of(demand) | share_of_group(TASK_SHARE)))


def map_nodes(function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
    """See `Launcher.map_nodes`. The tasks take no CPUs in Ray, so that a full node runs one too."""
    connect(1)
    remote = ray.remote(max_retries=0, num_cpus=0)(function)
    with deferring_stop_signals():
        running = {
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                item
            ): f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in nodes_of_stage()
        }
    deadline = time.monotonic() + NODE_SECONDS
    with _ending_tasks(running):
        while running and time.monotonic() < deadline:
            yield from _take_ended(running)
        yield from [(name, LostTask(f"no answer for {NODE_SECONDS:.0f} s")) for name in running.values()]


def _resources_of(demand: TaskDemand) -> dict[str, float]:
    """The demand by Ray's names of resources. Memory counts on a joined cluster alone, which can choose a node."""
    memory = {"memory": float(demand.memory_bytes)} if demand.memory_bytes and cluster_address() else {}
    return {"CPU": float(demand.num_cpus), **memory}


def _take_ended(running: dict[ray.ObjectRef[Any], T]) -> list[tuple[T, Any]]:
    """Remove the tasks that have ended, and return what each ran for and its result; empty after POLL_SECONDS."""
    with deferring_stop_signals():
        return [(running.pop(reference), _result_of(reference)) for reference in _wait_for_ended(running)]


def _result_of(reference: ray.ObjectRef[Any]) -> Any:
    try:
        return ray.get(reference)
    except LOST_BY_RAY as error:
        return LostTask(explain_lost_task(error), isinstance(error, ray.exceptions.OutOfMemoryError))


class RayGauges:
    """Gauges of a command that uses Ray. The node's metrics agent serves the gauges to Prometheus, under their names
    with the prefix `ray_`, and forgets them some time after the command has ended.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def set(self, name: str, description: str, labels: Mapping[str, str], value: float) -> None:
        """Set a gauge's value for the values of its labels; nothing happens before this process has joined Ray."""
        if not ray.is_initialized():
            return
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description, tag_keys=tuple(labels))
        self._gauges[name].set(value, dict(labels))
