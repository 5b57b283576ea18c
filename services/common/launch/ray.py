"""Ray: tasks for work that splits, Ray Train for workers that form a process group. The only import of Ray.

Without RAY_ADDRESS a Ray cluster of this machine alone is started in place, bound to loopback, and ends with
the program. With it, and on a node that declares a resource `stage_<name>`, all work stays on the nodes that
declare it: one cluster has the nodes of several stages, with different images.

Ray is used to launch, to notice dead workers and to hear of preemption, and for nothing else: checkpoints, data
order and metrics are files of ours.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from services.common.errors import MillraceError, NoRoomForWorkers, TryAgain, WorkersLost
from services.common.launch.launcher import (
    DRIVER_SHARE,
    LOOPBACK_INTERFACE,
    STAGE_RESOURCE_PREFIX,
    R,
    T,
    WorkerEnvironment,
    name_the_cause,
)

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # only small results travel through it
GROUP_START_SECONDS = 600.0
JOIN_SECONDS = 60.0
POLL_SECONDS = 1.0

TASK_SHARE = 0.001
_RESOURCE_UNITS = 10_000  # Ray counts resources in ten-thousandths

# A process or a node was lost, oftener than Ray runs a task again.
_LOST = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def map_tasks(function: Callable[[T], R], items: Sequence[T], num_workers: int) -> Iterator[tuple[int, R]]:
    """See `Launcher.map_tasks`. Ray runs a task again whose process or node was lost."""
    _connect(num_workers)
    group = _share_of_group(TASK_SHARE)
    _wait_for_room({"CPU": 1.0, **group}, 1)
    remote = ray.remote(max_retries=3, num_cpus=1, resources=group)(function)
    waiting = list(enumerate(items))[::-1]
    running: dict[ray.ObjectRef[Any], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                index, item = waiting.pop()
                running[remote.remote(item)] = index
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield running.pop(reference), ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except _LOST as error:
        raise WorkersLost(str(error)) from error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def run_workers(
    function: Callable[[Any, WorkerEnvironment], None],
    argument: Any,
    num_workers: int,
    threads_per_worker: int,
    workers_per_node: int,
    shared_folder: Path,
) -> None:
    """See `Launcher.run_workers`. Ray Train forms the gloo group; a lost worker ends the whole group here, and
    the caller decides whether to start another: Ray's own restart would go by Ray's own checkpoints.
    """
    import ray.train.torch  # noqa: PLC0415 - takes seconds and torch, which map_tasks needs neither of

    _connect(num_workers * threads_per_worker)
    demand = {"CPU": float(threads_per_worker), **_share_of_group(_worker_share(workers_per_node))}
    _wait_for_room(demand, num_workers)
    with _storage(shared_folder) as storage:
        trainer = ray.train.torch.TorchTrainer(
            _WorkerFunction(function, argument),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=num_workers, resources_per_worker=demand),
            run_config=ray.train.RunConfig(
                name="attempt",
                storage_path=storage,
                # Ray's type stubs describe Train V1.
                failure_config=ray.train.FailureConfig(  # type: ignore[call-arg]
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
                worker_runtime_env={"env_vars": _worker_variables()},
            ),
        )
        failures: list[Exception] = []
        thread = threading.Thread(target=_fit, args=(trainer, failures), name="ray-train", daemon=True)
        thread.start()
        while thread.is_alive():  # fit() in the main thread would take Ctrl-C and SIGTERM away from us
            thread.join(0.2)
    _end_coordinator()
    if failures:
        raise _explain(failures[0], demand, num_workers)


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. Takes up to 9 ms: a barrier over all workers through one actor."""
    import ray.train  # noqa: PLC0415

    return ray.train.get_preemption_info() is not None


class _WorkerFunction:
    """What Ray Train calls in each worker."""

    def __init__(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any) -> None:
        self._function, self._argument = function, argument

    def __call__(self) -> None:
        import ray.train  # noqa: PLC0415

        context = ray.train.get_context()
        environment = WorkerEnvironment(context.get_world_rank(), context.get_world_size(), "ray")
        self._function(self._argument, environment)


def _end_coordinator() -> None:
    """End the detached actor that Ray Train leaves on the driver's node: a node with an actor is never idle, so its pod
    would take the whole drain time to leave (60 s of 60 seen).
    """
    with suppress(ValueError):  # there is none
        ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))


def _fit(trainer: Any, failures: list[Exception]) -> None:
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
        failures.append(error)


def _explain(error: Exception, demand: dict[str, float], num_workers: int) -> Exception:
    """What the caller of `run_workers` gets for an error of Ray Train's."""
    import ray.train.v2._internal.exceptions as of_train  # noqa: PLC0415

    if isinstance(error, ray.train.WorkerGroupError):
        return _explain_worker_failures(error)
    cause = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
    if isinstance(cause, of_train.WorkerGroupStartupTimeoutError):
        return _no_room(demand, num_workers)
    lost = (of_train.WorkerGroupStartupFailedError, ray.train.PreemptionError, ray.exceptions.RayActorError)
    return WorkersLost(f"Ray lost a worker: {error}") if isinstance(cause, lost) else error


def _explain_worker_failures(error: Any) -> Exception:
    """One error for the group. A bug comes with Ray's report, which has the worker's traceback."""
    failures = error.worker_failures.values()
    # What a worker raised comes as itself; for one that died Ray puts an error of its own.
    raised = [failure for failure in failures if not type(failure).__module__.startswith("ray.")]
    cause = name_the_cause(raised, f"Ray lost a worker: {error}" if len(raised) < len(failures) else None)
    return cause if isinstance(cause, MillraceError | OSError) else RuntimeError(str(error))


def _connect(num_cpus: int) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        _wait_for_cluster(os.environ["RAY_ADDRESS"])
    else:
        # Else Ray replaces a loopback address by the one at which other machines reach this one. It read the
        # variable when it was imported, so this process needs the constant, and the processes it starts the variable.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        options |= {
            "address": "local",  # else Ray joins one that it finds on this machine, such as another command's
            "num_cpus": max(num_cpus, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        ray.init(**options, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}})
    except SystemExit as error:  # ray.init replaces the handler by one that exits with 1 or 15
        raise TryAgain("Stopped by SIGTERM while joining Ray. The same command continues the work.") from error
    except ConnectionError as error:
        raise _unreachable(error) from error
    finally:
        signal.signal(signal.SIGTERM, handler)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _wait_for_cluster(address: str) -> None:
    """Raises `TryAgain` when nobody listens at HOST:PORT for JOIN_SECONDS; `ray.init` would try for a quarter of an
    hour. Other addresses, such as `auto`, it resolves itself.
    """
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=POLL_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(error) from error
        time.sleep(POLL_SECONDS)


def _unreachable(error: OSError) -> TryAgain:
    return TryAgain(
        f"no Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} ({error}). Start it and run the same "
        f"command again, or unset RAY_ADDRESS: Ray is then started on this machine."
    )


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
    while _room_for(demand) < count:
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
    if "RAY_ADDRESS" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="millrace-ray-") as folder:
            yield folder
        return
    shared = shared_folder / "ray-train"
    shutil.rmtree(shared, ignore_errors=True)  # a killed command left it
    shared.mkdir(parents=True, exist_ok=True)
    try:
        yield str(shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _worker_variables() -> dict[str, str]:
    return {} if "RAY_ADDRESS" in os.environ else {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    cause = error.cause
    return cause if isinstance(cause, MillraceError | OSError) else error
