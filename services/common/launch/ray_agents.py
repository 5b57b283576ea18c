"""Lets Ray Train start one agent on each node of a stage, and run nothing else.

A worker of Ray Train takes the resources of all workers of its node. Its function starts the agent as a process of its
own, passes on Ray's notice that a node is about to be taken away, and returns when the agent has ended. Workers are
lost and started again by the agents, without Ray noticing. The loss of an agent, or of a node, ends the attempt of Ray
Train, and the next start of the workers begins another: Ray's own restart would use Ray's own checkpoints.

The number of Ray's actors, and what Ray asks them every second, grows with the number of nodes alone.
"""

from __future__ import annotations

import math
import os
import pickle  # nosec B403 # only the command's own bytes are pickled
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import ray
import ray.exceptions
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from services.common.errors import MillraceError, TryAgain, WorkersLost
from services.common.launch.agent_channel import reach_command
from services.common.launch.agent_group import AgentGroup, AgentLost
from services.common.launch.agent_process import AgentConfig
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import DRIVER_SHARE, WorkerEnvironment, WorkerGroupSpec, Workers, name_the_cause
from services.common.launch.neuron_environment import NEURON_DEVICES, require_every_core
from services.common.launch.node_agent import LOOPBACK_ADDRESS
from services.common.launch.process_family import STOPPED_SECONDS, Stopwatch, is_stopped
from services.common.launch.ray_cluster import RayCall, calling_ray, connect, require_ray
from services.common.launch.ray_room import GROUP_START_SECONDS, capacities_for, no_room, share_of_group, wait_for_room
from services.common.process.private_folder import new_name, private_folder

T = TypeVar("T")

POLL_SECONDS = 0.5
HEALTH_CHECK_SECONDS = 1.0
"""Seconds between two questions of Ray Train to its workers; Ray's default is 2."""
_SHOWN_CHARACTERS = 500
NODE_SHARE = 1 - DRIVER_SHARE
"""Share of a node's stage resource for its agent, so large that no second agent is started on a node."""

_DEVICES = {**dict.fromkeys(NEURON_DEVICES, "neuron_cores"), "cuda": "GPU"}
"""Ray's resource for the device of a worker."""
_RAY_VARIABLES = {
    # Keep Ray from choosing devices for an agent: a worker takes the device of its local rank, as with `inline`.
    "neuron_cores": {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1"},
    "GPU": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
}


_prepared: list[_Attempt] = []
"""The attempt of `prepare`, until its workers are opened."""


def prepare(spec: WorkerGroupSpec) -> None:
    """See `Launcher.prepare`. Begins an attempt where this machine is the cluster, which no other command uses."""
    if cluster_address() is None and not _prepared:
        _prepared.append(_begin_attempt(spec))


def open_workers(spec: WorkerGroupSpec) -> AbstractContextManager[Workers]:
    """See `Launcher.open_workers`."""
    return _RayWorkers(spec)


class _RayWorkers(AbstractContextManager["_RayWorkers"]):
    """Runs workers by the agents of an attempt of Ray Train; see `Workers`."""

    def __init__(self, spec: WorkerGroupSpec) -> None:
        self._spec = spec
        self._attempt: _Attempt | None = _prepared.pop() if _prepared else None
        if self._attempt and not self._attempt.take(spec):
            self.end()

    def run(self, function: Callable[[Any, WorkerEnvironment], None], argument: Any) -> None:
        """See `Workers.run`. Agents of an earlier call are used again, unless one of them was lost."""
        work = pickle.dumps((function, argument))
        self._attempt = self._attempt or _begin_attempt(self._spec)
        try:
            self._attempt.run(work)
        except AgentLost as error:
            failure = self.end()
            raise _explain(failure, self._spec) if failure else WorkersLost(str(error)) from error

    def end(self) -> Exception | None:
        """End the attempt, if there is one, and return the error with which Ray Train ended it."""
        attempt, self._attempt = self._attempt, None
        return attempt.end() if attempt else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the agents, and wait for Ray Train unless a stop signal ends the block: then there is no time for it."""
        if error is not None and not isinstance(error, Exception):
            if self._attempt:
                self._attempt.close()
            return
        with suppress(TryAgain):  # that Ray is lost, which no longer matters
            self.end()


def _begin_attempt(spec: WorkerGroupSpec) -> _Attempt:
    """Begin an attempt of Ray Train. Raises `DeviceError` and `TryAgain` where that is impossible on this machine."""
    if cluster_address() is None:
        require_every_core(spec.device)
        return _Attempt(replace(spec, workers_per_node=spec.num_workers), LOOPBACK_ADDRESS)
    connect(0)
    with calling_ray():
        if not share_of_group(NODE_SHARE):
            spec = replace(spec, workers_per_node=_fit_nodes(spec))
        return _Attempt(spec, ray.util.get_node_ip_address())


def _fit_nodes(spec: WorkerGroupSpec) -> int:
    """Return how many workers a node gets in a cluster whose nodes declare no stage: as many as fit on enough nodes."""
    capacities = capacities_for(_demand_of_node(replace(spec, workers_per_node=1)))
    sizes = range(spec.num_workers, 0, -1)
    fitting = (n for n in sizes if sum(each >= n for each in capacities) >= math.ceil(spec.num_workers / n))
    return next(fitting, spec.workers_per_node)


class _Attempt:
    """An attempt of Ray Train, in a thread, and the agents that it starts."""

    def __init__(self, spec: WorkerGroupSpec, host: str) -> None:
        """`host` is the command's address, at which agents reach it."""
        self._spec = spec
        self._agents = AgentGroup(host, _count_nodes(spec))
        self._call = RayCall(self._fit)

    def take(self, spec: WorkerGroupSpec) -> bool:
        """Use the agents for the workers that `spec` describes, and return whether the agents can start those workers.
        A command begins an attempt before it knows its folders.
        """
        folders = {"shared_folder": spec.shared_folder, "kept_folder": spec.kept_folder}
        here, self._spec = self._spec, replace(self._spec, **folders)  # type: ignore[arg-type]
        return self._spec == replace(spec, workers_per_node=here.workers_per_node)

    def run(self, work: bytes) -> None:
        """Run the workers on all nodes once. Raises `AgentLost` where the attempt is over."""
        self._agents.gather(self._require)
        self._agents.run(work, self._spec, self._require)

    def close(self) -> None:
        self._agents.close()

    def end(self) -> Exception | None:
        """End the agents and wait for the end of Ray Train. Return the error with which it ended, if any."""
        self.close()
        failure = self._call.wait()
        with calling_ray():
            if failure:
                _remove_placement_groups()
            if cluster_address():
                _end_coordinator()
        return failure

    def _require(self) -> None:
        require_ray()
        if self._call.has_ended(within_seconds=0):
            raise AgentLost("Ray Train has ended")

    def _fit(self) -> None:
        """Let Ray Train start the agents, and wait for their end.

        Raises `NoRoomForWorkers` where the cluster has not enough nodes that are large enough.
        """
        num_nodes, demand = _count_nodes(self._spec), _demand_of_node(self._spec)
        device = _DEVICES.get(self._spec.device)
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(GROUP_START_SECONDS))
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(HEALTH_CHECK_SECONDS))
        connect(int(demand["CPU"]), {device: demand[device]} if device else {})
        # The import takes a second, which tasks save. DataParallelTrainer, because the process group of Ray's
        # TorchTrainer listens on all interfaces.
        import ray.train  # noqa: PLC0415
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

        demand |= share_of_group(NODE_SHARE)
        wait_for_room(demand, num_nodes)
        if cluster_address() is None:
            _keep_out_of_object_store()
            os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor, whose import takes seconds
        with _storage(self._spec.shared_folder) as storage:
            DataParallelTrainer(
                _AgentFunction(self._agents.address, self._agents.key.hex(), self._spec.preload),
                scaling_config=ray.train.ScalingConfig(
                    num_workers=num_nodes,
                    use_gpu=device == "GPU",
                    resources_per_worker=demand,
                    placement_strategy="PACK" if num_nodes == 1 else "STRICT_SPREAD",
                ),
                run_config=ray.train.RunConfig(
                    name="attempt",
                    storage_path=storage,
                    # Ray's type stubs describe Train V1.
                    failure_config=ray.train.FailureConfig(  # type: ignore[call-arg]
                        max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                    ),
                    worker_runtime_env={"env_vars": _RAY_VARIABLES.get(device or "", {})},
                ),
            ).fit()


def _count_nodes(spec: WorkerGroupSpec) -> int:
    return math.ceil(spec.num_workers / spec.workers_per_node)


def _demand_of_node(spec: WorkerGroupSpec) -> dict[str, float]:
    """The resources that the workers of a full node need."""
    num_workers = min(spec.num_workers, spec.workers_per_node)
    devices = {_DEVICES[spec.device]: float(num_workers)} if spec.device in _DEVICES else {}
    return {"CPU": float(num_workers * spec.threads_per_worker), **devices}


class _AgentFunction:
    """The function of a worker of Ray Train: starts the agent of its node, and returns when the agent has ended."""

    def __init__(self, command: tuple[str, int], key: str, preload: tuple[str, ...]) -> None:
        self._command, self._key, self._preload = command, key, preload

    def __call__(self) -> None:
        from ray.train.v2._internal.execution.context import get_train_context  # noqa: PLC0415

        reach_command(*self._command).close()  # here, where the error reaches the command by Ray
        context = get_train_context()
        address = LOOPBACK_ADDRESS if self._command[0] == LOOPBACK_ADDRESS else ray.util.get_node_ip_address()
        config = AgentConfig(context.get_world_rank(), address, self._command, self._key, os.getpid(), self._preload)
        command = [sys.executable, "-m", "services.common.launch.agent_process"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment_of_agent()) as agent:
            assert agent.stdin is not None
            agent.stdin.write(config.to_line())
            agent.stdin.flush()
            is_told, frozen = False, Stopwatch()
            while agent.poll() is None:
                # On nodes without the command there is no guard, and the command would wait for a frozen agent.
                if frozen.look(is_stopped(agent.pid)) >= STOPPED_SECONDS:
                    agent.kill()
                # Ray Train's own question for it is a barrier of all nodes at one actor.
                if not is_told and context.preemption_context.preemption_info is not None:
                    is_told = True
                    with suppress(BrokenPipeError):
                        agent.stdin.write(b"preemption\n")
                        agent.stdin.flush()
                time.sleep(POLL_SECONDS)
        if agent.returncode:
            raise WorkersLost(f"the agent of {ray.util.get_node_ip_address()} ended with {agent.returncode}")


def _environment_of_agent() -> dict[str, str]:
    """This process's environment, without Ray's folder of libraries in PYTHONPATH, which hide the project's own."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [folder for folder in folders if not Path(folder).is_relative_to(Path(ray.__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(own)}


class _Value(Generic[T]):
    """Stands for Ray Train's reference to an object in the object store, and holds the object itself."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


def _keep_out_of_object_store() -> None:
    """Let Ray Train pass the function by value on this machine.

    The object store dies with the raylet, and Ray's library ends a process with 1 that has lost an object: the command
    could then not end with 75.
    """
    from ray.train.v2.api import data_parallel_trainer  # noqa: PLC0415

    vars(data_parallel_trainer)["ObjectRefWrapper"] = _Value  # the module does not export the name


def _remove_placement_groups() -> None:
    """Remove the placement groups of this command, of which none is in use between two attempts.

    A controller of Ray Train that was killed leaves its own, which would keep the nodes from the next attempt. Ray's
    cleaner asks the dashboard whether the controller is alive, and a cluster of this machine alone has no dashboard.
    """
    job = ray.get_runtime_context().get_job_id()
    for group, description in ray.util.placement_group_table().items():
        if group.endswith(job) and description["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def _end_coordinator() -> None:
    """Kill the detached actor that Ray Train leaves on the driver's node. A node with an actor is never idle, so its
    pod would take the whole drain time to leave (60 s of 60 were measured).
    """
    with suppress(ValueError):  # there is no such actor
        ray.kill(ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator"))


def _explain(error: Exception, spec: WorkerGroupSpec) -> Exception:
    """Translate an error of Ray Train into the one that `Workers.run` raises. Workers' own errors do not pass Ray."""
    import ray.train.v2._internal.exceptions as train_errors  # noqa: PLC0415

    if isinstance(error, MillraceError):
        return error
    if isinstance(error, ray.train.WorkerGroupError):
        raised = [each for each in error.worker_failures.values() if isinstance(each, MillraceError)]
        # Ray's report of a process that died has a line of its own for the reason.
        told = "; ".join(
            f"node {rank}: {' '.join(str(getattr(each, 'health_check_failure', each)).split())[:_SHOWN_CHARACTERS]}"
            for rank, each in error.worker_failures.items()
        )
        return name_the_cause(raised, f"Ray lost an agent, {told}")  # type: ignore[return-value]
    cause = error.controller_failure if isinstance(error, ray.train.ControllerError) else error
    if isinstance(cause, train_errors.WorkerGroupStartupTimeoutError):
        return no_room(_demand_of_node(spec) | share_of_group(NODE_SHARE), _count_nodes(spec))
    lost = (train_errors.WorkerGroupStartupFailedError, ray.train.PreemptionError, ray.exceptions.RayActorError)
    return WorkersLost(f"Ray lost an agent: {error}") if isinstance(cause, lost) else error


@contextmanager
def _storage(shared_folder: Path) -> Iterator[str]:
    """Make a folder for Ray Train's own files, which all nodes see; it is removed when the block ends."""
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
