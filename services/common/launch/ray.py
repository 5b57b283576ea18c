"""Ray: tasks for work that splits, Ray Train for workers that form a process group. The only import of Ray.

Without RAY_ADDRESS a Ray cluster of this machine alone is started in place: bound to loopback, in a session of its own,
which a signal to the command's process group does not reach, and ending with the program. With it, and on a node that
declares a resource `stage_<name>`, all work stays on the nodes that declare it: one cluster has the nodes of several
stages, with different images.

Ray is used to launch, to notice dead workers and to hear of preemption, and for nothing else: checkpoints, data
order and metrics are files of ours.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from services.common.errors import DeviceError, MillraceError, NoRoomForWorkers, TryAgain, WorkersLost, call_at_end
from services.common.launch.cluster_address import AUTO, cluster_address, split_address
from services.common.launch.guard import end_sessions
from services.common.launch.launcher import (
    DRIVER_SHARE,
    LOOPBACK_INTERFACE,
    STAGE_RESOURCE_PREFIX,
    R,
    T,
    WorkerEnvironment,
    name_the_cause,
)
from services.common.private_folder import new_name, private_folder
from services.common.stop_signals import deferring_stop_signals

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # only small results travel through it
GROUP_START_SECONDS = 600.0
JOIN_SECONDS = 60.0
POLL_SECONDS = 1.0
LOST_SECONDS = 20.0
FIT_THREAD = "ray-train"

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
            with _calling_ray():
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
        if running and not _watch.is_lost():
            with _calling_ray():
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
    """See `Launcher.run_workers`. A lost worker ends the whole group here, and the caller decides whether to start
    another: Ray's own restart would go by Ray's own checkpoints.
    """
    # Takes a second, which map_tasks saves. Ray's TorchTrainer would let a process group listen on all interfaces.
    import ray.train  # noqa: PLC0415
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

    _connect(num_workers * threads_per_worker)
    demand = {"CPU": float(threads_per_worker), **_share_of_group(_worker_share(workers_per_node))}
    _wait_for_room(demand, num_workers)
    with _storage(shared_folder) as storage:
        meeting_file = None if cluster_address() else Path(storage) / "rendezvous"
        trainer = DataParallelTrainer(
            _WorkerFunction(function, argument, meeting_file),
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
        thread = threading.Thread(target=_fit, args=(trainer, failures), name=FIT_THREAD, daemon=True)
        thread.start()
        while thread.is_alive():  # fit() in the main thread would take Ctrl-C and SIGTERM away from us
            thread.join(0.2)
            _watch.require_ray()
    with _calling_ray():
        _end_coordinator()
    if failures:
        raise _explain(failures[0], demand, num_workers)


def is_preemption_noticed() -> bool:
    """See `Launcher.is_preemption_noticed`. Takes up to 9 ms: a barrier over all workers through one actor."""
    import ray.train  # noqa: PLC0415

    return ray.train.get_preemption_info() is not None


class _WorkerFunction:
    """What Ray Train calls in each worker."""

    def __init__(
        self, function: Callable[[Any, WorkerEnvironment], None], argument: Any, meeting_file: Path | None
    ) -> None:
        self._function, self._argument, self._meeting_file = function, argument, meeting_file

    def __call__(self) -> None:
        import ray.train  # noqa: PLC0415

        context = ray.train.get_context()
        environment = WorkerEnvironment(context.get_world_rank(), context.get_world_size(), "ray")
        os.environ["MILLRACE_RENDEZVOUS"] = str(self._meeting_file or _agree_on_address(environment.rank))
        self._function(self._argument, environment)


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


class _Watch:
    """Notices that Ray itself is lost. Ray's library would end the process a minute later, with 1."""

    def __init__(self) -> None:
        self._lost = threading.Event()
        self._what = ""

    def begin(self, find_lost: Callable[[], str]) -> None:
        """Ask `find_lost` every POLL_SECONDS, until it answers with a few words or Ray has been left."""
        threading.Thread(target=self._ask, args=(find_lost,), name="ray-watch", daemon=True).start()

    def is_lost(self, within_seconds: float = 0.0) -> bool:
        return self._lost.wait(within_seconds)

    def require_ray(self) -> None:
        """Raises `TryAgain` when Ray is lost."""
        if self.is_lost():
            raise self.loss

    @property
    def loss(self) -> TryAgain:
        return TryAgain(f"Ray was lost: {self._what}. The same command continues from what was committed.")

    def _ask(self, find_lost: Callable[[], str]) -> None:
        watched = ray._private.worker._global_node
        while not self._what:
            time.sleep(POLL_SECONDS)
            self._what = find_lost()
            if not ray.is_initialized() or ray._private.worker._global_node is not watched:
                self._what = ""
                return
        self._lost.set()
        time.sleep(LOST_SECONDS)  # enough, unless the main thread hangs in a call into Ray
        os.write(2, f"millrace: {self.loss}\n".encode())
        os._exit(TryAgain.exit_code)


_watch = _Watch()


@contextmanager
def _calling_ray() -> Iterator[None]:
    """For calls into Ray by the main thread: Ray drops what a signal handler raises there, and prints it.

    Raises `TryAgain` when Ray is lost.
    """
    with deferring_stop_signals():
        try:
            _watch.require_ray()
            yield
        except MillraceError:
            raise
        except Exception as error:
            if _watch.is_lost(within_seconds=2 * POLL_SECONDS):
                raise _watch.loss from error
            raise


def _connect(num_cpus: int) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine."""
    if ray.is_initialized():
        _watch.require_ray()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": {"PYTHONPATH": _python_path()}},
    }
    address = cluster_address()
    if address is None:
        _start_here(options, num_cpus)
    else:
        _join(address, options)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _start_here(options: dict[str, Any], num_cpus: int) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # an empty one
    # Else Ray replaces a loopback address by the one at which other machines reach this one. It read the
    # variable when it was imported, so this process needs the constant, and the processes it starts the variable.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    stack = ExitStack()
    # Ray's own folder would be one that everybody can write to.
    folder = stack.enter_context(private_folder(new_name("ray"), is_short=True))
    started: list[subprocess.Popen[Any]] = []
    call_at_end(partial(_leave, started, stack))
    with deferring_stop_signals(), _leaving_sigterm_to_us(), _starting_sessions(started):
        try:
            ray.init(
                address="local",  # else Ray joins one that it finds on this machine, such as another command's
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                **options,
            )
        except Exception as error:
            raise _explain_failed_start(error, started) from error
    node: Any = ray._private.worker._global_node
    essential = {name: node.all_processes[name][0].process for name in ("gcs_server", "raylet")}
    _watch.begin(partial(_find_ended, essential))


def _find_ended(processes: dict[str, subprocess.Popen[Any]]) -> str:
    return ", ".join(
        f"its process {name} ended with {process.returncode}"
        for name, process in processes.items()
        if process.poll() is not None
    )


def _explain_failed_start(error: Exception, started: list[subprocess.Popen[Any]]) -> Exception:
    """A process that was killed, or a machine too busy for Ray's own time limits, is no reason to give up."""
    ended = [process for process in started if process.poll() is not None]
    if not ended and isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return error
    return TryAgain(f"Ray did not start on this machine: {error}. The same command tries it again.")


@contextmanager
def _leaving_sigterm_to_us() -> Iterator[None]:
    """Ray would replace our handler by one that exits with 1 or 15."""
    utils = ray._private.utils
    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


@contextmanager
def _starting_sessions(started: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Let each process of Ray's lead a session, to which no signal to our group comes, and end with this process."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "services.common.launch.guard"],
        env={**os.environ, "PYTHONPATH": _python_path()},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    services: Any = ray._private.services
    popen = services.ConsolePopen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        process = popen(*arguments, **options, start_new_session=True)
        started.append(process)
        with suppress(BrokenPipeError):  # the guard was killed
            os.write(guard.stdin.fileno(), f"{process.pid}\n".encode())  # type: ignore[union-attr]
        return process

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = popen
    started.append(guard)


def _python_path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _leave(started: list[subprocess.Popen[Any]], folder: ExitStack, exit_code: int) -> None:
    """End the Ray that was started here."""
    # Ray's library would wait for what is lost, or end this process itself when the thread goes on, with other codes.
    is_orderly = not _watch.is_lost() and all(thread.name != FIT_THREAD for thread in threading.enumerate())
    if is_orderly:
        ray.shutdown()
    for process in started:
        process.kill()
        process.wait()
    end_sessions({process.pid for process in started})
    folder.close()
    if not is_orderly:
        sys.stdout.flush()
        os._exit(exit_code)


def _join(address: str, options: dict[str, Any]) -> None:
    if address == AUTO:
        address = os.environ["RAY_ADDRESS"] = _find_cluster()
    _wait_for_cluster(address)
    with deferring_stop_signals(), _leaving_sigterm_to_us():
        try:
            # Fails in 40 s where something else listens; ray.init would try for a quarter of an hour.
            client: Any = ray._raylet
            client.GcsClient(address=ray._private.services.canonicalize_bootstrap_address(address))
            ray.init(**options)
        except Exception as error:
            if "ersion mismatch" in str(error):
                raise DeviceError(f"the Ray cluster at {address} is another: {error}") from error
            raise _unreachable(error) from error


def _find_cluster() -> str:
    """The address of the cluster that has a node on this machine."""
    del os.environ["RAY_ADDRESS"]  # Ray would take `auto` for what was found
    try:
        return ray._private.services.canonicalize_bootstrap_address_or_die(AUTO)
    except ConnectionError as error:
        os.environ["RAY_ADDRESS"] = AUTO
        raise _unreachable(error) from error


def _wait_for_cluster(address: str) -> None:
    """Raises `TryAgain` when nobody listens at HOST:PORT for JOIN_SECONDS."""
    place = split_address(address)
    assert place is not None
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            socket.create_connection(place, timeout=POLL_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(error) from error
        time.sleep(POLL_SECONDS)


def _unreachable(error: Exception) -> TryAgain:
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
    while True:
        with _calling_ray():
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
    shutil.rmtree(shared, ignore_errors=True)  # a killed command left it
    shared.mkdir(parents=True, exist_ok=True)
    try:
        yield str(shared)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _worker_variables() -> dict[str, str]:
    return {} if cluster_address() else {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    cause = error.cause
    return cause if isinstance(cause, MillraceError | OSError) else error
