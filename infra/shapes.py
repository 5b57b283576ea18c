"""The shapes of nodes: what an EC2 instance type has, what it leaves to pods, where there is any, about what it costs.

`shapes.json` is the only table of shapes. Terraform reads it with `jsondecode`, the services, which know no
infrastructure, through `services/common/hardware/instance_types.py`, and everything else through this module. Its
facts are those of EC2's DescribeInstanceTypes and DescribeInstanceTypeOfferings, to which a test holds them. The memory
of a Trainium2 and the peaks of Trainium come from AWS Neuron's documentation, the peaks of GPUs from
`services/common/hardware/gpu_peaks.py`; `pod` and the prices are our own. Instance types with GPUs serve the trainer's
plan alone: no stack makes nodes of them.
`file_system` in the same file is no shape: see `services/common/hardware/lustre.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deploy.stage_contract import Resources
from services.common.errors import RecipeError

SHAPES_JSON = Path(__file__).parent / "shapes.json"


@dataclass(frozen=True)
class PodRoom:
    """What a node leaves to the one pod of a stage on it, after the system, kubelet and the daemons of every node."""

    cpus: int
    memory_gib: int
    storage_gib: int
    """Of the node's own disk, which images and logs share."""
    huge_pages_gib: int
    """In pages of 2 MiB, which the EFA driver reserves at boot; 0 where there is none."""
    shared_memory_gib: int
    """Of `memory_gib`, what the workers of a pod on Trainium share in /dev/shm; 0: no pod there has one of its own."""


@dataclass(frozen=True)
class Price:
    """A hint: it differs by region, and nobody keeps it up to date."""

    dollars_per_hour: float
    """Of a node on demand."""
    region: str
    source: str
    dated: str
    """Year and month."""


@dataclass(frozen=True)
class Shape:
    """One instance type."""

    name: str
    vcpus: int
    memory_gib: int
    architecture: str
    """As EC2 calls it: x86_64 or arm64."""
    neuron_devices: int
    """Chips; the resource aws.amazon.com/neuron counts them."""
    neuron_cores: int
    """Physical NeuronCores of the node."""
    logical_core_size: int | None
    """Physical NeuronCores that make one logical by default (Neuron's LNC); None where there is no choice."""
    gpus: int
    """NVIDIA GPUs of the node, each for one worker; such a type is known to plans, and no pod runs there."""
    device_memory_gib: int
    """Memory of one chip or GPU."""
    peak_bf16_tflops: float
    """Of the node, dense."""
    network_cards: int
    efa_cards: int
    """Interfaces with EFA at most, one a card; the resource vpc.amazonaws.com/efa counts them."""
    interfaces_per_card: int
    nvme_gb: int
    huge_pages_gib: int | None
    """What of the node's memory the EFA driver reserves at boot, in pages of 2 MiB; None where nobody has looked, for
    no pod runs there."""
    supports_capacity_block: bool
    supports_placement_group: bool
    zone_ids: dict[str, tuple[str, ...]]
    """By region, in the regions that have Trainium. Ids, because zones' names differ from account to account."""
    pod: PodRoom | None
    """None: no stage runs there."""
    price: Price

    @property
    def pod_resources(self) -> Resources:
        """What a stage's pod takes: the whole node, so that pods and nodes are as many.

        Raises `RecipeError` for a shape that no stage runs on.
        """
        if self.pod is None:
            raise RecipeError(f"no stage runs on {self.name}: infra/shapes.json does not say what it leaves to a pod")
        return Resources(
            cpus=self.pod.cpus,
            memory_gib=self.pod.memory_gib,
            storage_gib=self.pod.storage_gib,
            huge_pages_gib=self.pod.huge_pages_gib,
            shared_memory_gib=self.pod.shared_memory_gib,
            neuron_devices=self.neuron_devices,
            neuron_cores=self.neuron_cores,
            efa_cards=self.efa_cards,
        )


@cache
def read_shapes() -> dict[str, Shape]:
    """The table, by instance type."""
    table = json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["shapes"]
    return {name: _read_shape(name, facts) for name, facts in table.items()}


def find_shape(name: str) -> Shape:
    """Raises `RecipeError` for a type that is not in the table."""
    shapes = read_shapes()
    if name not in shapes:
        raise RecipeError(
            f"instance type {name!r} is not in infra/shapes.json, which has {', '.join(shapes)}: add it there"
        )
    return shapes[name]


def _read_shape(name: str, facts: dict[str, Any]) -> Shape:
    zone_ids = {region: tuple(zones) for region, zones in facts["zone_ids"].items()}
    pod = PodRoom(**facts["pod"]) if facts["pod"] else None
    return Shape(name, **facts | {"zone_ids": zone_ids, "pod": pod, "price": Price(**facts["price"])})
