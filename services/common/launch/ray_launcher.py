"""The launcher `ray`: Ray tasks for work that splits, Ray Train for workers that form a process group.

One cluster may have nodes of several stages, with different images. A command on a node that declares the resource
`stage_<name>` places its work on nodes that declare the same resource.

Ray starts processes, notices dead workers and tells of preemption, and does nothing else: checkpoints, data order and
metrics are Millrace's own files.
"""

from __future__ import annotations

import logging
import math
import os
import pickle  # nosec B403 # only the driver's own bytes are loaded
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import psutil
import ray
import ray.exceptions
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.common.errors import MillraceError, NoRoomForWorkers, WorkersLost
from services.common.launch.cluster_address import cluster_address
from services.common.launch.fork_server import import_modules
from services.common.launch.launcher import (
    DRIVER_SHARE,
    LOOPBACK_INTERFACE,
    NODE_SECONDS,
    STAGE_RESOURCE_PREFIX,
    LostTask,
    R,
    T,
    TaskDemand,
    WorkerEnvironment,
    WorkerGroupSpec,
    Workers,
    name_the_cause,
)
from services.common.launch.neuron_environment import NEURON_DEVICES, require_every_core
from services.common.launch.node_board import BOARD_FILE, NodeBoard
from services.common.launch.ray_cluster import call_in_thread, calling_ray, connect, is_lost
from services.common.process.private_folder import new_name, private_folder

logger = logging.getLogger(__name__)

GROUP_START_SECONDS = 600.0
POLL_SECONDS = 1.0
BOARD_SECONDS = 0.02

GPU = "GPU"
"""Name of the GPU resource in Ray."""
# Keeps Ray from choosing a GPU for a worker: as with `inline`, a worker takes the GPU of its local rank.
GPU_WORKER_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

TASK_SHARE = 0.001
_RESOURCE_UNITS = 10_000  # Ray counts resources in ten-thousandths

# Errors of Ray for a lost process or node, raised where a task is not run again.
_LOST = (
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. Ray runs a task up to three times more when its process or node was lost."""
    connect(num_workers)
    group = _share_of_group(TASK_SHARE)
    _wait_for_room({"CPU": 1.0, **group}, 1)
    remote = ray.remote(max_retries=3, num_cpus=1, resources=group)(function)
    waiting = enumerate(items)
    running: dict[ray.ObjectRef[Any], int] = {}
    with _ending_tasks(running):
        while True:
            with calling_ray():
                for index, item in islice(waiting, num_workers - len(running)):
                    running[remote.remote(item)] = index
                if not running:
                    return
                results = [(running.pop(reference), ray.get(reference)) for reference in _wait_for_ended(running)]
            yield from results


def map_on_nodes(function: Callable[[T], R], items: Sequence[T], tasks_per_node: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_on_nodes`. The tasks take none of Ray's resources, of which workers may have taken all."""
    connect(1)
    with calling_ray():
        free = [node["NodeID"] for node in _nodes_of_stage()] * tasks_per_node
        remote = ray.remote(max_retries=0, num_cpus=0)(function)
    waiting = list(enumerate(items))[::-1]
    running: dict[ray.ObjectRef[Any], tuple[int, str]] = {}
    with _ending_tasks(running):
        while waiting or running:
            with calling_ray():
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
    if not first or not others:
        return list(first)
    return [*first, *ray.wait(others, num_returns=len(others), timeout=0)[0]]


@contextmanager
def _ending_tasks(running: Mapping[ray.ObjectRef[Any], object]) -> Iterator[None]:
    """Raise the own error of a failed task, and `WorkersLost` for a lost one; cancel tasks that are still running."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except _LOST as error:
        raise WorkersLost(str(error)) from error
    finally:
        _cancel(list(running))


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
    try:
        while True:
            while len(running) < num_workers and (taken := take()) is not None:
                item, demand = taken
                connect(num_workers * demand.num_cpus)
                if demand not in placed:
                    group, resources = _share_of_group(TASK_SHARE), _resources_of(demand)
                    _wait_for_room({**resources, **group}, 1)
                    memory = resources.get("memory")
                    placed[demand] = remote.options(num_cpus=demand.num_cpus, memory=memory, resources=group)
                with calling_ray():
                    running[placed[demand].remote(item)] = item
            if not running:
                return
            with calling_ray():
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                results = [(running.pop(reference), _result_of(reference)) for reference in done]
            yield from results
            if not results:
                yield None
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    finally:
        _cancel(list(running))


def has_room(demand: TaskDemand) -> bool:
    """See `Launcher.has_room`."""
    if cluster_address() is None:
        return demand.memory_bytes <= psutil.virtual_memory().total
    with calling_ray():
        return _room_for({**_resources_of(demand), **_share_of_group(TASK_SHARE)}) > 0


def map_nodes(function: Callable[[T], R], item: T) -> Iterator[tuple[str, R | LostTask]]:
    """See `Launcher.map_nodes`. The tasks take no CPUs in Ray, so that a full node runs one too."""
    connect(1)
    with calling_ray():
        remote = ray.remote(max_retries=0, num_cpus=0)(function)
        running = {
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                item
            ): f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in _nodes_of_stage()
        }
    deadline = time.monotonic() + NODE_SECONDS
    try:
        while running and time.monotonic() < deadline:
            with calling_ray():
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                results = [(running.pop(reference), _result_of(reference)) for reference in done]
            yield from results
        yield from [(name, LostTask(f"no answer for {NODE_SECONDS:.0f} s")) for name in running.values()]
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    finally:
        _cancel(list(running))


def _resources_of(demand: TaskDemand) -> dict[str, float]:
    """The demand by Ray's names of resources. Memory counts on a joined cluster alone, which can choose a node."""
    memory = {"memory": float(demand.memory_bytes)} if demand.memory_bytes and cluster_address() else {}
    return {"CPU": float(demand.num_cpus), **memory}


def _result_of(reference: ray.ObjectRef[Any]) -> Any:
    try:
        return ray.get(reference)
    except _LOST as error:
        return LostTask(str(error), isinstance(error, ray.exceptions.OutOfMemoryError))


def _cancel(running: Sequence[ray.ObjectRef[Any]]) -> None:
    if running and not is_lost():
        with calling_ray():
            for reference in running:
                ray.cancel(reference, force=True)


def prepare(spec: WorkerGroupSpec) -> None:
    """See `Launcher.prepare`. Nothing can be prepared before the command joins or starts a cluster."""


@contextmanager
def open_workers(spec: WorkerGroupSpec) -> Iterator[Workers]:
    """See `Launcher.open_workers`."""
    yield _RayWorkers(spec)


class _RayWorkers:
    """Runs each worker as a worker of Ray Train; see `Workers`."""

    def __init__(self, spec: WorkerGroupSpec) -> None:
        self._spec = spec

    def run(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any) -> None:
        """See `Workers.run`."""
        _run_workers(function, argument, self._spec)


def _run_workers(function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec) -> None:
    """Start Ray Train's workers and wait for their end. A lost worker ends the whole group, and the caller decides
    whether to start another: Ray's own restart would use Ray's own checkpoints.
    """
    # The import takes a second, which map_tasks saves. DataParallelTrainer, because the process group of Ray's
    # TorchTrainer listens on all interfaces.
    import ray.train  # noqa: PLC0415
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

    from services.common.launch import ray_neuron  # noqa: PLC0415

    is_on_neuron = spec.device in NEURON_DEVICES
    is_on_gpu = spec.device == "cuda"
    devices = {ray_neuron.NEURON_CORES: 1.0} if is_on_neuron else {GPU: 1.0} if is_on_gpu else {}
    if cluster_address() is None:
        require_every_core(spec.device)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
    connect(spec.num_workers * spec.threads_per_worker, {name: n * spec.num_workers for name, n in devices.items()})
    demand = {"CPU": float(spec.threads_per_worker), **devices, **_share_of_group(_worker_share(spec.workers_per_node))}
    _wait_for_room(demand, spec.num_workers)
    with _storage(spec.shared_folder) as storage:
        rendezvous = "" if cluster_address() else str(Path(storage) / "rendezvous")
        trainer = DataParallelTrainer(
            _WorkerFunction(function, argument, rendezvous, spec.preload),
            backend_config=ray_neuron.NeuronConfig(spec.device, spec.logical_core_size) if is_on_neuron else None,
            scaling_config=ray.train.ScalingConfig(
                num_workers=spec.num_workers, use_gpu=is_on_gpu, resources_per_worker=demand
            ),
            run_config=ray.train.RunConfig(
                name="attempt",
                storage_path=storage,
                # Ray's type stubs describe Train V1.
                failure_config=ray.train.FailureConfig(  # type: ignore[call-arg]
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
                worker_runtime_env={
                    "env_vars": _worker_variables()
                    | (ray_neuron.WORKER_VARIABLES if is_on_neuron else {})
                    | (GPU_WORKER_VARIABLES if is_on_gpu else {})
                },
            ),
        )
        if cluster_address() is None:
            _keep_out_of_object_store()
        failure = call_in_thread(trainer.fit)
    if cluster_address():
        with calling_ray():
            _end_coordinator()
    if failure is not None:
        raise _explain(failure, demand, spec.num_workers)


class _Value(Generic[T]):
    """Stands for Ray Train's reference to an object in the object store, and holds the object itself."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


def _keep_out_of_object_store() -> None:
    """Let Ray Train pass the workers' function by value on this machine.

    The object store dies with the raylet, and Ray's library ends a process with 1 that has lost an object: the command
    could then not end with 75.
    """
    from ray.train.v2.api import data_parallel_trainer  # noqa: PLC0415

    vars(data_parallel_trainer)["ObjectRefWrapper"] = _Value  # the module does not export the name


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. The call takes up to 9 ms: it is a barrier of all workers at one actor."""
    import ray.train  # noqa: PLC0415

    return ray.train.get_preemption_info() is not None


class _WorkerFunction:
    """The function that Ray Train calls in each worker."""

    def __init__(
        self,
        function: Callable[[Any, WorkerEnvironment], None],
        argument: Any,
        rendezvous: str,
        preload: tuple[str, ...],
    ) -> None:
        """`rendezvous` is the file in which workers of one machine meet; empty where they agree on an address."""
        self._work = pickle.dumps((function, argument))  # bytes, so that `preload` is imported first
        self._rendezvous, self._preload = rendezvous, preload
        self._folder_name = new_name("workers")

    def __call__(self) -> None:
        import ray.train  # noqa: PLC0415

        import_modules(self._preload, can_fork=False)
        function, argument = pickle.loads(self._work)  # nosec B301 # bytes that the driver made
        context = ray.train.get_context()
        rank = context.get_world_rank()
        rendezvous = self._rendezvous or _agree_on_address(rank)
        world_size, local_world_size = context.get_world_size(), context.get_local_world_size()
        with private_folder(self._folder_name) as folder:  # the node's workers share it
            environment = WorkerEnvironment(
                rank,
                world_size,
                "ray",
                rendezvous,
                local_rank=context.get_local_rank(),
                local_world_size=local_world_size,
                node_rank=context.get_node_rank(),
                num_nodes=math.ceil(world_size / local_world_size),
                node_folder=folder,
            )
            if environment.local_rank == 0:
                NodeBoard.make(folder, local_world_size)
            while not (folder / BOARD_FILE).exists():
                time.sleep(BOARD_SECONDS)
            function(argument, environment)


def _agree_on_address(rank: int) -> str:
    """Agree on the address at which the workers of several nodes meet: a free port of rank 0's node."""
    from ray._common.network_utils import build_address  # type: ignore[attr-defined]  # noqa: PLC0415
    from ray.train._internal.utils import get_address_and_port  # noqa: PLC0415
    from ray.train.collective import broadcast_from_rank_zero  # noqa: PLC0415

    return broadcast_from_rank_zero(f"tcp://{build_address(*get_address_and_port())}" if rank == 0 else None)


def _end_coordinator() -> None:
    """Kill the detached actor that Ray Train leaves on the driver's node. A node with an actor is never idle, so its
    pod would take the whole drain time to leave (60 s of 60 were measured).
    """
    with suppress(ValueError):  # there is no such actor
        ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))


def _explain(error: Exception, demand: dict[str, float], num_workers: int) -> Exception:
    """Translate an error of Ray Train into the one that `Workers.run` raises."""
    import ray.train.v2._internal.exceptions as train_errors  # noqa: PLC0415

    if isinstance(error, ray.train.WorkerGroupError):
        return _explain_worker_failures(error)
    cause = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
    if isinstance(cause, train_errors.WorkerGroupStartupTimeoutError):
        return _no_room(demand, num_workers)
    lost = (train_errors.WorkerGroupStartupFailedError, ray.train.PreemptionError, ray.exceptions.RayActorError)
    if isinstance(cause, lost):
        return WorkersLost(f"Ray lost a worker: {error}")
    # A RayTaskError comes from the backend's part on a worker's node.
    raised = _cause(cause) if isinstance(cause, ray.exceptions.RayTaskError) else None
    return raised if isinstance(raised, MillraceError) else error


def _explain_worker_failures(error: Any) -> Exception:
    """Choose the error of a failed group. An unexpected one carries Ray's report, with the worker's traceback."""
    failures = error.worker_failures.items()
    # An error that a worker raised comes unchanged; for a worker that died Ray has an error of its own.
    raised = [failure for _, failure in failures if not type(failure).__module__.startswith("ray.")]
    # Only the first line of Ray's report, which goes on with tracebacks of the workers that lost this one.
    died = [
        f"rank {rank}: {str(failure).strip().partition(chr(10))[0]}"
        for rank, failure in failures
        if failure not in raised
    ]
    cause = name_the_cause(raised, f"Ray lost {'; '.join(died)}" if died else None)
    return cause if isinstance(cause, MillraceError | OSError) else RuntimeError(str(error))


def _share_of_group(share: float) -> dict[str, float]:
    """The demand that keeps work on the nodes of this node's stage; empty where nodes declare no stage."""
    here = ray.get_runtime_context().get_node_id()
    declared = [name for node in _live_nodes() if node["NodeID"] == here for name in node["Resources"]]
    return {name: share for name in declared if name.startswith(STAGE_RESOURCE_PREFIX)}


def _worker_share(workers_per_node: int) -> float:
    """Share of a node's stage resource for one worker, so large that `workers_per_node` workers fill the node: a lost
    worker is never started again on a node that has all its workers.
    """
    return math.floor((1 - DRIVER_SHARE) / workers_per_node * _RESOURCE_UNITS) / _RESOURCE_UNITS


def _wait_for_room(demand: dict[str, float], count: int) -> None:
    """Wait until the running nodes could hold `count` times `demand` if nothing else ran on them.

    Raises `NoRoomForWorkers` after GROUP_START_SECONDS: Ray itself has no limit.
    """
    deadline = time.monotonic() + GROUP_START_SECONDS
    while True:
        with calling_ray():
            if _room_for(demand) >= count:
                return
        if time.monotonic() > deadline:
            raise _no_room(demand, count)
        time.sleep(POLL_SECONDS)


def _room_for(demand: dict[str, float]) -> int:
    nodes = [node["Resources"] for node in _live_nodes()]
    return sum(int(min(node.get(name, 0.0) / amount for name, amount in demand.items())) for node in nodes)


def _no_room(demand: dict[str, float], count: int) -> NoRoomForWorkers:
    def show(resources: dict[str, float]) -> str:
        return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in demand)

    nodes = "".join(f"\n  {node['NodeManagerAddress']}  {show(node['Resources'])}" for node in _live_nodes())
    return NoRoomForWorkers(
        f"for {GROUP_START_SECONDS:.0f} s the Ray cluster had no room for {count} x ({show(demand)}). Its live nodes "
        f"have, free or in use:{nodes}\n"
        f"Add nodes to the stage's worker group, or stop other work on them, and run the same command again."
    )


def _nodes_of_stage() -> list[dict[str, Any]]:
    """Return the live nodes that declare the stage of this node: all live nodes where nodes declare no stage."""
    group = _share_of_group(TASK_SHARE)
    return [node for node in _live_nodes() if group.keys() <= node["Resources"].keys()]


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


@contextmanager
def _storage(shared_folder: Path) -> Iterator[str]:
    """Make a folder for Ray Train's own files, which all workers see; it is removed when the block ends."""
    if cluster_address() is None:
        with private_folder(new_name("train")) as folder:
            yield str(folder)
        return
    shared = shared_folder / "ray-train"
    _remove(shared)  # left by a command that was killed
    shared.mkdir(parents=True, exist_ok=True)
    try:
        yield str(shared)
    finally:
        _remove(shared)


def _remove(path: Path) -> None:
    """Remove a folder, or any file in its place: `shutil.rmtree` would open a pipe and wait for a writer."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _worker_variables() -> dict[str, str]:
    return {} if cluster_address() else {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    cause = error.cause
    return cause if isinstance(cause, MillraceError | OSError) else error


class RayGauges:
    """Gauges of a driver or worker of Ray. The node's metrics agent serves them to Prometheus, under their names with
    the prefix `ray_`, and forgets them some time after the process has ended.
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
