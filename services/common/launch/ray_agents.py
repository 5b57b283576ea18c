"""Starts one agent on each node of a stage by a task of Ray, which does nothing else.

The tasks are a gang: a placement group holds the resources of a node's workers on each node before the first task
starts. A task starts the agent as a process of its own, and returns when the agent has ended. Workers are lost and
started again by the agents, without Ray noticing. The loss of an agent, or of its node, ends the attempt, and the next
start of the workers begins another.

The number of Ray's tasks grows with the number of nodes alone. The command asks Ray's head once a second, in two calls
for all nodes, whether a node was lost, and whether one is about to be taken away.
"""

from __future__ import annotations

import math
import os
import pickle  # nosec B403 # only the command's own bytes are pickled
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.common.errors import TryAgain, WorkersLost
from services.common.launch import ray_room
from services.common.launch.agent_channel import reach_command
from services.common.launch.agent_group import END_SECONDS, AgentGroup, AgentLost
from services.common.launch.agent_process import AgentConfig
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import DRIVER_SHARE, WorkerEnvironment, WorkerGroupSpec, Workers
from services.common.launch.neuron_environment import NEURON_DEVICES, require_every_core
from services.common.launch.node_agent import LOOPBACK_ADDRESS
from services.common.launch.process_family import STOPPED_SECONDS, is_stopped
from services.common.launch.ray_cluster import connect
from services.common.launch.ray_losses import explain_lost_node, find_lost_nodes, raising_causes
from services.common.launch.ray_watch import RayCall, calling_ray, require_ray
from services.common.process.stopwatch import Stopwatch

POLL_SECONDS = 0.5
WAIT_SECONDS = 1
"""Whole seconds of a wait in Ray: for less than one, `PlacementGroup.wait` returns at once. Between two waits the
command asks Ray's head about the nodes of the workers.
"""
NODE_SHARE = 1 - DRIVER_SHARE
"""Share of a node's stage resource that an agent takes, so that no node has room for a second agent."""
_SHOWN_RANKS = 8

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
    """Runs workers by the agents of an attempt; see `Workers`."""

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
            raise (self.end() or WorkersLost(str(error))) from error

    def end(self) -> Exception | None:
        """End the attempt, if there is one, and return the error with which one of its agents ended."""
        attempt, self._attempt = self._attempt, None
        return attempt.end() if attempt else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the agents, and wait for their tasks unless a stop signal ends the block: then there is no time."""
        if error is not None and not isinstance(error, Exception):
            if self._attempt:
                self._attempt.close()
            return
        with suppress(TryAgain):  # Ray is lost, which no longer matters
            self.end()


def _begin_attempt(spec: WorkerGroupSpec) -> _Attempt:
    """Begin an attempt. Raises `DeviceError` and `TryAgain` where that is impossible on this machine."""
    if cluster_address() is None:
        require_every_core(spec.device)
        return _Attempt(replace(spec, workers_per_node=spec.num_workers), LOOPBACK_ADDRESS)
    connect(0)
    with calling_ray():
        if not ray_room.share_of_group(NODE_SHARE):
            spec = replace(spec, workers_per_node=_fit_nodes(spec))
        return _Attempt(spec, ray.util.get_node_ip_address())


def _fit_nodes(spec: WorkerGroupSpec) -> int:
    """Return how many workers a node gets in a cluster whose nodes declare no stage: as many as fit on enough nodes."""
    capacities = ray_room.capacities_for(_demand_of_node(replace(spec, workers_per_node=1)))
    sizes = range(spec.num_workers, 0, -1)
    fitting = (n for n in sizes if sum(each >= n for each in capacities) >= math.ceil(spec.num_workers / n))
    return next(fitting, spec.workers_per_node)


class _Attempt:
    """A gang of Ray's tasks, one on each node, and the agents that they start."""

    def __init__(self, spec: WorkerGroupSpec, host: str) -> None:
        """`host` is the command's address, at which agents reach it."""
        self._spec = spec
        self._agents = AgentGroup(host, _count_nodes(spec))
        self._is_over = threading.Event()
        self._call = RayCall(self._run_tasks)

    def take(self, spec: WorkerGroupSpec) -> bool:
        """Use the agents for the workers that `spec` describes, and return whether the agents can start those workers.
        A command begins an attempt before it knows its folders.
        """
        self._spec = replace(self._spec, shared_folder=spec.shared_folder, kept_folder=spec.kept_folder)
        return self._spec == replace(spec, workers_per_node=self._spec.workers_per_node)

    def run(self, work: bytes) -> None:
        """Run the workers on all nodes once. Raises `AgentLost` where the attempt is over."""
        self._agents.gather(self._require)
        self._agents.run(work, self._spec, self._require)

    def close(self) -> None:
        self._is_over.set()
        self._agents.close()

    def end(self) -> Exception | None:
        """End the agents and wait for the end of their tasks. Return the error with which they ended, if any."""
        self.close()
        return self._call.wait()

    def _require(self) -> None:
        require_ray()
        if self._is_over.is_set() or self._call.has_ended(within_seconds=0):
            raise AgentLost("a task of Ray that had started an agent has ended")

    def _run_tasks(self) -> None:
        """Start the agents by tasks of Ray, and wait for their end.

        Raises `NoRoomForWorkers` where the cluster has not enough nodes that are large enough, and `WorkersLost`.
        """
        num_nodes, demand = _count_nodes(self._spec), _demand_of_node(self._spec)
        device = _DEVICES.get(self._spec.device)
        connect(int(demand["CPU"]), {device: demand[device]} if device else {})
        with calling_ray():
            demand |= ray_room.share_of_group(NODE_SHARE)
            with _placed(demand, num_nodes) as gang:
                self._await_placement(gang, demand, num_nodes)
                if not self._is_over.is_set():
                    self._follow(gang, self._start_tasks(gang, demand, _RAY_VARIABLES.get(device or "")))

    def _await_placement(self, gang: PlacementGroup, demand: dict[str, float], num_nodes: int) -> None:
        waited = Stopwatch()
        while not self._is_over.is_set() and not gang.wait(WAIT_SECONDS):
            if waited.look(True) > ray_room.GROUP_START_SECONDS:
                raise ray_room.no_room(demand, num_nodes)

    def _start_tasks(
        self, gang: PlacementGroup, demand: dict[str, float], variables: dict[str, str] | None
    ) -> list[ray.ObjectRef[None]]:
        others = {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")}
        task = ray.remote(
            max_retries=0,
            num_cpus=demand["CPU"],
            num_gpus=demand.get("GPU", 0),
            resources=others,
            runtime_env={"env_vars": variables} if variables else {},
        )(run_agent)
        return [
            task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(gang, node_rank)).remote(
                node_rank, self._agents.address, self._agents.key.hex(), self._spec.preload
            )
            for node_rank in range(gang.bundle_count)
        ]

    def _follow(self, gang: PlacementGroup, tasks: list[ray.ObjectRef[None]]) -> None:
        """Wait until a task ends or the command closes the agents, then for all tasks, and raise the first error.

        Raises `WorkersLost` where Ray has lost a node, whose task may never end, and where an agent does not come: its
        node was lost before the task started, or is frozen.
        """
        waited = Stopwatch()
        placed: dict[int, str] = placement_group_table(gang)["bundles_to_node_id"]
        # A node that was lost since its placement has an empty id.
        nodes = [placed[rank] or ray.NodeID.nil().hex() for rank in range(len(tasks))]
        ended: list[ray.ObjectRef[None]] = []
        lost: list[int] = []
        while not (ended or lost or self._is_over.is_set()):
            ended, _ = ray.wait(tasks, timeout=WAIT_SECONDS)
            absent = self._agents.absent_ranks if not self._is_over.is_set() else []
            if waited.look(bool(absent)) > ray_room.GROUP_START_SECONDS:
                ranks = ", ".join(map(str, absent[:_SHOWN_RANKS]))
                raise WorkersLost(
                    f"the agents of {len(absent)} of {len(tasks)} nodes, the first of them {ranks}, did not connect "
                    f"within {ray_room.GROUP_START_SECONDS:.0f} s of their placement: these nodes are lost, frozen or "
                    f"very slow"
                )
            if cluster_address():
                lost = find_lost_nodes(nodes)
        self._is_over.set()
        # The command closes the connections of the other agents, which then end in order.
        others = [task for rank, task in enumerate(tasks) if rank not in lost]
        others, _ = ray.wait(others, num_returns=len(others), timeout=END_SECONDS) if others else ([], [])
        if lost:
            raise WorkersLost(f"node {lost[0]} of the workers was lost: {explain_lost_node(nodes[lost[0]])}")
        for task in [*ended, *others]:
            with raising_causes(f"the agent of node {tasks.index(task)}"):
                ray.get(task)


@contextmanager
def _placed(demand: dict[str, float], num_nodes: int) -> Iterator[PlacementGroup]:
    """Ask Ray for the resources of `num_nodes` nodes, each on a node alone, and give them back after the block."""
    gang = placement_group([demand] * num_nodes, strategy="PACK" if num_nodes == 1 else "STRICT_SPREAD")
    try:
        yield gang
    finally:
        remove_placement_group(gang)


def _count_nodes(spec: WorkerGroupSpec) -> int:
    return math.ceil(spec.num_workers / spec.workers_per_node)


def _demand_of_node(spec: WorkerGroupSpec) -> dict[str, float]:
    """The resources that the workers of a full node need."""
    num_workers = min(spec.num_workers, spec.workers_per_node)
    devices = {_DEVICES[spec.device]: float(num_workers)} if spec.device in _DEVICES else {}
    return {"CPU": float(num_workers * spec.threads_per_worker), **devices}


def run_agent(node_rank: int, command: tuple[str, int], key: str, preload: tuple[str, ...]) -> None:
    """Start the agent of this node, and return when it has ended: the task of Ray on each node.

    Raises `TryAgain` where the node cannot reach the command, and `WorkersLost` where the agent fails.
    """
    reach_command(*command).close()  # here, where the error reaches the command by Ray
    address = LOOPBACK_ADDRESS if command[0] == LOOPBACK_ADDRESS else ray.util.get_node_ip_address()
    config = AgentConfig(node_rank, address, command, key, os.getpid(), preload)
    process = [sys.executable, "-m", "services.common.launch.agent_process"]
    with subprocess.Popen(process, stdin=subprocess.PIPE, env=_environment_of_agent()) as agent:
        assert agent.stdin is not None
        with suppress(BrokenPipeError), agent.stdin as stdin:  # the agent was killed, which its exit code says
            stdin.write(config.to_line())
        frozen = Stopwatch()
        while agent.poll() is None:
            # On nodes without the command there is no guard, and the command would wait for a frozen agent.
            if frozen.look(is_stopped(agent.pid)) >= STOPPED_SECONDS:
                agent.kill()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(POLL_SECONDS)
    if agent.returncode:
        raise WorkersLost(f"the agent of {ray.util.get_node_ip_address()} ended with {agent.returncode}")


def _environment_of_agent() -> dict[str, str]:
    """This process's environment, without Ray's folder of libraries in PYTHONPATH, which hide the project's own."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [folder for folder in folders if not Path(folder).is_relative_to(Path(ray.__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(own)}
