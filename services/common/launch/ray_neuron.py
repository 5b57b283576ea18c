"""The Ray Train backend for workers on NeuronCores: gives every worker its variables before its function is called.

Ray's own TorchXLAConfig is not used: its workers of several nodes do not find one another
(https://github.com/ray-project/ray/issues/65070), it kills processes by name, and it compiles on the gang's nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray.train
import ray.util
from ray.train.backend import Backend, BackendConfig

from services.common.launch.neuron_environment import (
    MeetingPoint,
    WorkerPlace,
    find_meeting_point,
    find_network,
    neuron_environment,
    set_neuron_environment,
)

NEURON_CORES = "neuron_cores"
"""Name of the NeuronCore resource in Ray."""

# Keeps Ray from choosing a core for a worker, whatever the worker's rank.
WORKER_VARIABLES = {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1"}


@dataclass
class NeuronConfig(BackendConfig):
    device: str
    logical_core_size: int | None

    @property
    def backend_cls(self) -> type[Backend]:
        return NeuronBackend


class NeuronBackend(Backend):
    """Tells every worker its rank, its core and the meeting point; starts and ends no process."""

    def on_start(self, worker_group: Any, backend_config: NeuronConfig) -> None:  # type: ignore[override]
        meeting = worker_group.execute_single(0, _offer_meeting_point)
        worker_group.execute(_set_environment, backend_config.device, backend_config.logical_core_size, meeting)


def _offer_meeting_point() -> MeetingPoint:
    return find_meeting_point(ray.util.get_node_ip_address())


def _set_environment(device: str, logical_core_size: int | None, meeting: MeetingPoint) -> None:
    context = ray.train.get_context()
    place = WorkerPlace(
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
    )
    network = find_network(ray.util.get_node_ip_address())
    set_neuron_environment(neuron_environment(device, place, meeting, network, logical_core_size))
