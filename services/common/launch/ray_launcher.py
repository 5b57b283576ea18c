"""Ray: tasks for work that splits, Ray Train for workers that form a process group.

On a node of a joined cluster that declares a resource `stage_<name>`, all work stays on the nodes that declare it: one
cluster has the nodes of several stages, with different images.

Ray is used to launch, to notice dead workers and to hear of preemption, and for nothing else: checkpoints, data
order and metrics are files of ours.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic

import psutil
import ray
import ray.exceptions
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.common.errors import MillraceError, NoRoomForWorkers, WorkersLost
from services.common.input.files import read_file
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
    name_the_cause,
)
from services.common.launch.neuron_environment import NEURON_DEVICES, require_every_core
from services.common.launch.ray_cluster import begin_start, call_in_thread, calling_ray, connect, is_lost
from services.common.process.private_folder import new_name, private_folder

logger = logging.getLogger(__name__)

GROUP_START_SECONDS = 600.0
POLL_SECONDS = 1.0
HEALTH_CHECK_SECONDS = 0.5
"""On this machine alone: a cluster's controller asks every worker."""

GPU = "GPU"
"""Ray's name for the resource."""
# Ray would show each worker a GPU that it chose itself; a worker takes that of its place on the node, as inline.
GPU_WORKER_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

TASK_SHARE = 0.001
_RESOURCE_UNITS = 10_000  # Ray counts resources in ten-thousandths

# A process or a node was lost, oftener than Ray runs a task again.
_LOST = (
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. Ray runs a task again whose process or node was lost."""
    connect(num_workers)
    group = _share_of_group(TASK_SHARE)
    _wait_for_room({"CPU": 1.0, **group}, 1)
    remote = ray.remote(max_retries=3, num_cpus=1, resources=group)(function)
    waiting = list(enumerate(items))[::-1]
    running: dict[ray.ObjectRef[Any], int] = {}
    try:
        while waiting or running:
            with calling_ray():
                while waiting and len(running) < num_workers:
                    index, item = waiting.pop()
                    running[remote.remote(item)] = index
                done, _ = ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                results = [(running.pop(reference), ray.get(reference)) for reference in done]
            yield from results
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except _LOST as error:
        raise WorkersLost(str(error)) from error
    finally:
        _cancel(list(running))


def run_tasks(
    function: Callable[[T], R], take: Callable[[], tuple[T, TaskDemand] | None], num_workers: int
) -> Generator[tuple[T, R | LostTask] | None, None, None]:
    """See `Launcher.run_tasks`. Ray does not run a lost task again: with what demand, the caller decides."""
    running: dict[ray.ObjectRef[Any], T] = {}
    remote = ray.remote(max_retries=0)(function)  # once: a worker loads a function anew that is made remote again
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
    """See `Launcher.map_nodes`. A task takes no CPU of its node, so that one which is full gets it too."""
    connect(1)
    with calling_ray():
        group = _share_of_group(TASK_SHARE)
        nodes = [node for node in _live_nodes() if group.keys() <= node["Resources"].keys()]
        remote = ray.remote(max_retries=0, num_cpus=0)(function)
        running = {
            remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                item
            ): f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in nodes
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
    """In Ray's names. A Ray that was started in place counts no memory: this machine is what there is."""
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
    """See `Launcher.prepare`. A cluster that is joined has been started by somebody else."""
    if spec.device == "cpu":  # Ray would be told of devices that may not be there
        begin_start(spec.num_workers * spec.threads_per_worker)


def run_workers(function: Callable[[Any, WorkerEnvironment], None], argument: Any, spec: WorkerGroupSpec) -> None:
    """See `Launcher.run_workers`. A lost worker ends the whole group here, and the caller decides whether to start
    another: Ray's own restart would go by Ray's own checkpoints.
    """
    # Takes a second, which map_tasks saves. Ray's TorchTrainer would let a process group listen on all interfaces.
    import ray.train  # noqa: PLC0415
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

    from services.common.launch import ray_neuron  # noqa: PLC0415

    is_on_neuron = spec.device in NEURON_DEVICES
    is_on_gpu = spec.device == "cuda"
    devices = {ray_neuron.NEURON_CORES: 1.0} if is_on_neuron else {GPU: 1.0} if is_on_gpu else {}
    if cluster_address() is None:
        require_every_core(spec.device)
    _set_train_variables()
    connect(spec.num_workers * spec.threads_per_worker, {name: n * spec.num_workers for name, n in devices.items()})
    demand = {"CPU": float(spec.threads_per_worker), **devices, **_share_of_group(_worker_share(spec.workers_per_node))}
    _wait_for_room(demand, spec.num_workers)
    with _storage(spec.shared_folder) as storage:
        local_folder = None if cluster_address() else Path(storage)
        trainer = DataParallelTrainer(
            _WorkerFunction(function, argument, local_folder, spec.preload),
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
            _leave_cleaner_out(trainer)
            _keep_out_of_object_store()
        failure = call_in_thread(trainer.fit)
    if cluster_address():
        with calling_ray():
            _end_coordinator()
    if failure is not None:
        raise _explain(failure, demand, spec.num_workers)


def _set_train_variables() -> None:
    """What Ray Train reads where it is started. It looks every two seconds whether a worker has died, and starts a
    process that looks whether one of the nodes is to leave, which this machine alone does not announce.
    """
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
    if cluster_address() is None:
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(HEALTH_CHECK_SECONDS))
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")


def _leave_cleaner_out(trainer: Any) -> None:
    """Of Ray Train's processes the one that frees what a lost controller held of a cluster. Here all ends together."""
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback  # noqa: PLC0415

    callbacks = trainer._create_default_callbacks()
    kept = [each for each in callbacks if not isinstance(each, PlacementGroupCleanerCallback)]
    trainer._create_default_callbacks = lambda: kept


class _Value(Generic[T]):
    """What Ray Train is handed in place of its reference to an object in the object store, where that is small."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


def _keep_out_of_object_store() -> None:
    """Let Ray Train pass the function of the workers by value.

    The object store goes with the raylet. Ray's library ends a process with 1, there and then, that has lost an object
    with it and tells itself so, which is before a command of ours can end with 75.
    """
    from ray.train.v2.api import data_parallel_trainer  # noqa: PLC0415

    vars(data_parallel_trainer)["ObjectRefWrapper"] = _Value  # it does not export the name


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. Takes up to 9 ms: a barrier over all workers through one actor."""
    import ray.train  # noqa: PLC0415

    return ray.train.get_preemption_info() is not None


class _WorkerFunction:
    """What Ray Train calls in each worker."""

    def __init__(
        self,
        function: Callable[[Any, WorkerEnvironment], None],
        argument: Any,
        local_folder: Path | None,
        preload: tuple[str, ...],
    ) -> None:
        """In a `local_folder`, which all workers see and nobody else, lies what else would be sent to each of them."""
        # As bytes: Ray would import what they are of, at its own pace.
        work = pickle.dumps((function, argument))
        self._work_file = local_folder and local_folder / "work"
        if self._work_file:
            self._work_file.write_bytes(work)
        self._work = b"" if self._work_file else work
        self._rendezvous_file, self._preload = local_folder and local_folder / "rendezvous", preload

    def __call__(self) -> None:
        import ray.train  # noqa: PLC0415

        import_modules(self._preload, can_fork=False)
        function, argument = pickle.loads(read_file(self._work_file) if self._work_file else self._work)

        context = ray.train.get_context()
        rank = context.get_world_rank()
        rendezvous = str(self._rendezvous_file or _agree_on_address(rank))
        place = (rank, context.get_world_size(), "ray", rendezvous, context.get_local_rank())
        function(argument, WorkerEnvironment(*place))


def _agree_on_address(rank: int) -> str:
    """Where the workers of several nodes meet: an address of rank 0's node."""
    from ray._common.network_utils import build_address  # type: ignore[attr-defined]  # noqa: PLC0415
    from ray.train._internal.utils import get_address_and_port  # noqa: PLC0415
    from ray.train.collective import broadcast_from_rank_zero  # noqa: PLC0415

    return broadcast_from_rank_zero(f"tcp://{build_address(*get_address_and_port())}" if rank == 0 else None)


def _end_coordinator() -> None:
    """End the detached actor that Ray Train leaves on the driver's node: a node with an actor is never idle, so its pod
    would take the whole drain time to leave (60 s of 60 seen).
    """
    with suppress(ValueError):  # there is none
        ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))


def _explain(error: Exception, demand: dict[str, float], num_workers: int) -> Exception:
    """What the caller of `run_workers` gets for an error of Ray Train's."""
    import ray.train.v2._internal.exceptions as of_train  # noqa: PLC0415

    if isinstance(error, ray.train.WorkerGroupError):
        return _explain_worker_failures(error)
    cause = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
    if isinstance(cause, of_train.WorkerGroupStartupTimeoutError):
        return _no_room(demand, num_workers)
    lost = (of_train.WorkerGroupStartupFailedError, ray.train.PreemptionError, ray.exceptions.RayActorError)
    if isinstance(cause, lost):
        return WorkersLost(f"Ray lost a worker: {error}")
    told = _cause(cause) if isinstance(cause, ray.exceptions.RayTaskError) else None  # by a backend, of a worker's node
    return told if isinstance(told, MillraceError) else error


def _explain_worker_failures(error: Any) -> Exception:
    """One error for the group. A bug comes with Ray's report, which has the worker's traceback."""
    failures = error.worker_failures.items()
    # What a worker raised comes as itself; for one that died Ray puts an error of its own.
    raised = [failure for _, failure in failures if not type(failure).__module__.startswith("ray.")]
    # Of Ray's report the first line alone: it goes on with tracebacks of those that lost this worker.
    died = [
        f"rank {rank}: {str(failure).strip().partition(chr(10))[0]}"
        for rank, failure in failures
        if failure not in raised
    ]
    cause = name_the_cause(raised, f"Ray lost {'; '.join(died)}" if died else None)
    return cause if isinstance(cause, MillraceError | OSError) else RuntimeError(str(error))


def _share_of_group(share: float) -> dict[str, float]:
    """The demand that keeps work on the nodes of this node's stage; none where nodes declare no stage."""
    here = ray.get_runtime_context().get_node_id()
    declared = [name for node in _live_nodes() if node["NodeID"] == here for name in node["Resources"]]
    return {name: share for name in declared if name.startswith(STAGE_RESOURCE_PREFIX)}


def _worker_share(workers_per_node: int) -> float:
    """So much of a node's stage resource that no further worker fits: one that is lost is not started again on a node
    that has its workers already.
    """
    return math.floor((1 - DRIVER_SHARE) / workers_per_node * _RESOURCE_UNITS) / _RESOURCE_UNITS


def _wait_for_room(demand: dict[str, float], count: int) -> None:
    """Wait until the nodes that are up could hold `count` times `demand` if nothing else ran on them.

    Raises `NoRoomForWorkers` when that takes longer than GROUP_START_SECONDS: Ray itself waits for ever.
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
        f"have, free or taken:{nodes}\n"
        f"Add nodes to the stage's group, or end what runs on them; the same command continues."
    )


def _live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


@contextmanager
def _storage(shared_folder: Path) -> Iterator[str]:
    """A folder for Ray Train's own files, which all of its workers have to see."""
    if cluster_address() is None:
        with private_folder(new_name("train")) as folder:
            yield str(folder)
        return
    shared = shared_folder / "ray-train"
    _remove(shared)  # a killed command left it
    shared.mkdir(parents=True, exist_ok=True)
    try:
        yield str(shared)
    finally:
        _remove(shared)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever is in its place: `shutil.rmtree` would open a pipe, and wait for a writer."""
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
    """Numbers of a process that is a worker of Ray: its node's metrics agent serves them to Prometheus, with `ray_`
    before their names.
    """

    def __init__(self, descriptions: dict[str, str], tags: dict[str, str]) -> None:
        self._tags = tags
        self._gauges = {name: Gauge(name, text, tag_keys=tuple(tags)) for name, text in descriptions.items()}

    def set(self, values: dict[str, float]) -> None:
        """Those that are known; the others keep theirs."""
        for name, value in values.items():
            self._gauges[name].set(value, self._tags)
