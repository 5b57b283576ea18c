"""Runs workers on a Ray cluster by Ray Train: one of its workers a node, which starts the node's elastic agent.

Ray Train places the nodes as a gang, restarts all of them where a node or its agent was lost, tells of preemption,
and lists the run in its API. A worker that was lost is started again by the agents, without Ray noticing.
"""

from __future__ import annotations

import math
import os
import pickle  # nosec B403 # bytes that processes of the same command made
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from services.common.errors import WorkersLost
from services.common.launch import ray_placement
from services.common.launch.cluster_address import cluster_address
from services.common.launch.launcher import (
    DRIVER_SHARE,
    WorkerGroup,
    WorkerGroupSpec,
    name_the_cause,
)
from services.common.launch.neuron_environment import NEURON_DEVICES, require_every_core
from services.common.launch.ray_cluster import connect
from services.common.launch.ray_node import LOSS_FILE, LossFile, NodeBackend, describe_loss, run_on_node
from services.common.launch.ray_placement import capacities_for, no_room, share_of_group, wait_for_room

_train: Any = ray.train  # whose types are those of the first version for mypy
NODE_SHARE = 1 - DRIVER_SHARE
"""Share of a node's stage resource that Ray Train's worker takes, so that no node has room for a second one."""
COORDINATOR = "AutoscalingCoordinator"
"""Name and namespace of Ray Train's actor that outlives a run (ray issue 58481)."""
POLL_SECONDS = 0.2
START_SECONDS = 60.0
"""Seconds of one try of Ray Train to place the nodes and to start its workers there."""

_DEVICES = {**dict.fromkeys(NEURON_DEVICES, "neuron_cores"), "cuda": "GPU"}
"""Ray's resource for the device of a worker."""
_VARIABLES = {
    # Keep Ray from choosing devices for a node: a worker takes the device of its local rank, as with `inline`.
    "neuron_cores": {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1"},
    "GPU": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"},
}


def run_workers(group: WorkerGroup) -> None:
    """See `Launcher.run_workers`."""
    spec, demand = _place(group.spec)
    group, num_nodes = replace(group, spec=spec), _count_nodes(spec)
    seconds = min(START_SECONDS, ray_placement.GROUP_START_SECONDS)
    tries = math.ceil(ray_placement.GROUP_START_SECONDS / seconds) - 1
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(seconds)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    storage = group.storage_path or spec.shared_folder
    (spec.shared_folder / LOSS_FILE).unlink(missing_ok=True)
    # Ray Train would require that all checkpoints of an earlier run exist, of which retention removes some.
    (storage / group.name / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    trainer = _train.torch.TorchTrainer(
        partial(run_on_node, group),
        torch_config=NodeBackend(),
        scaling_config=_train.ScalingConfig(
            num_workers=num_nodes,
            use_gpu="GPU" in demand,
            resources_per_worker=demand,
            placement_strategy="STRICT_SPREAD" if num_nodes > 1 else "PACK",
        ),
        run_config=_train.RunConfig(
            name=group.name,
            storage_path=str(storage),
            failure_config=_train.FailureConfig(group.max_node_losses, controller_failure_limit=tries),
            callbacks=[LossFile(spec.shared_folder / LOSS_FILE)],
            worker_runtime_env={"env_vars": variables} if (variables := _variables_of(spec)) else None,
        ),
    )
    try:
        result = _fit(trainer)
    except WorkerGroupError as error:
        raise _explain(error) from error
    except ControllerError as error:
        failure = error.controller_failure
        if type(failure).__name__ == "WorkerGroupStartupTimeoutError":  # Ray exports no name for it
            raise no_room(demand, num_nodes) from error
        raise WorkersLost(f"Ray Train could not start the nodes: {failure}") from error
    finally:
        _end_coordinator()
    if result.return_value is not None:
        raise pickle.loads(result.return_value)  # nosec B301 # bytes of this command's node 0


def _place(spec: WorkerGroupSpec) -> tuple[WorkerGroupSpec, dict[str, float]]:
    """Join or start Ray; return the spec with the number of a node's workers, and a node's demand.

    Raises `NoRoomForWorkers` where no node of the cluster is large enough.
    """
    if cluster_address() is None:
        require_every_core(spec.device)
        spec = replace(spec, workers_per_node=spec.num_workers)
        demand = _demand_of_node(spec)
        connect(int(demand["CPU"]), {name: amount for name, amount in demand.items() if name != "CPU"})
        return spec, demand
    connect(0)
    share = share_of_group(NODE_SHARE)
    if not share:
        spec = replace(spec, workers_per_node=_fit_nodes(spec))
    demand = _demand_of_node(spec) | share
    wait_for_room(demand, _count_nodes(spec))
    return spec, demand


def _count_nodes(spec: WorkerGroupSpec) -> int:
    return math.ceil(spec.num_workers / spec.workers_per_node)


def _fit_nodes(spec: WorkerGroupSpec) -> int:
    """Return how many workers a node gets in a cluster whose nodes declare no stage: as many as fit on enough nodes."""
    capacities = capacities_for(_demand_of_node(replace(spec, workers_per_node=1)))
    sizes = range(spec.num_workers, 0, -1)
    fitting = (n for n in sizes if sum(each >= n for each in capacities) >= math.ceil(spec.num_workers / n))
    return next(fitting, spec.workers_per_node)


def _demand_of_node(spec: WorkerGroupSpec) -> dict[str, float]:
    """The resources that the workers of a full node need."""
    num_workers = min(spec.num_workers, spec.workers_per_node)
    devices = {_DEVICES[spec.device]: float(num_workers)} if spec.device in _DEVICES else {}
    return {"CPU": float(num_workers * spec.threads_per_worker), **devices}


def _variables_of(spec: WorkerGroupSpec) -> dict[str, str]:
    return _VARIABLES.get(_DEVICES.get(spec.device, ""), {})


def _fit(trainer: Any) -> Any:
    """Fit in a thread: in the main thread it would keep Ctrl-C and SIGTERM from the command."""
    future: Future[Any] = Future()

    def fit() -> None:
        try:
            future.set_result(trainer.fit())
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            future.set_exception(error)

    threading.Thread(target=fit, name="ray-train", daemon=True).start()
    while not future.done():
        wait([future], POLL_SECONDS)  # in pieces, between which signals are handled
    return future.result()


def _end_coordinator() -> None:
    """End the actor that Ray Train leaves on this node for ever, and for which a preempted node would be kept whole.

    Another command of the cluster does without it: it asks for a size that does not change.
    """
    with suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(COORDINATOR, namespace=COORDINATOR))


def _explain(error: WorkerGroupError) -> BaseException:
    """Return the error that explains why Ray Train gave up: a node's own, or the loss of a node."""
    own = [each for each in error.worker_failures.values() if not type(each).__module__.startswith("ray.")]
    by_ray = {rank: each for rank, each in error.worker_failures.items() if each not in own}
    return name_the_cause(own, next((describe_loss(rank, each) for rank, each in by_ray.items()), None))
