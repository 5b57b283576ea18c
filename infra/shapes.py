"""Reads the table of EC2 instance types: hardware, room for a pod, zones, and approximate prices.

`shapes.json` is the only such table. Terraform reads it with `jsondecode`, the services through
`services/common/hardware/instance_types.py`, and everything else through this module. Its facts are those of EC2's
DescribeInstanceTypes and DescribeInstanceTypeOfferings; a test compares them. The memory of a Trainium2, the peaks of
Trainium and all of the Neuron devices of trn2u, of which EC2 says nothing, come from AWS Neuron's documentation (Amazon
EC2 Trn2 Architecture), the peaks of GPUs from `services/common/hardware/gpus.py`; `pod` and the choice of prices
are our own. Instance types with GPUs serve only the trainer's plan: no stack makes such nodes.
`services/common/hardware/instance_types.py` describes `file_system` in the same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from deploy.stage_contract import Resources
from services.common.errors import RecipeError

SHAPES_JSON = Path(__file__).parent / "shapes.json"


@dataclass(frozen=True)
class Price:
    """An approximate price, which differs by region and is not kept up to date."""

    dollars_per_hour: float
    """Price of a node on demand."""
    region: str
    source: str
    dated: str
    """Year and month, as in 2026-06."""

    def describe_origin(self) -> str:
        return f"{self.region}, {self.dated}: {self.source}"


@dataclass(frozen=True)
class Shape:
    """The facts of an EC2 instance type that Python uses; Terraform reads further ones."""

    name: str
    vcpus: int
    memory_gib: int
    neuron_devices: int
    """Number of Neuron chips, which the resource aws.amazon.com/neuron counts."""
    neuron_cores: int
    """Number of physical NeuronCores."""
    gpus: int
    """Number of NVIDIA GPUs. Types with GPUs serve only plans; no pod runs there."""
    efa_cards: int
    """Maximum number of EFA interfaces, one per card, which the resource vpc.amazonaws.com/efa counts."""
    huge_pages_gib: int | None
    """Memory in pages of 2 MiB that the EFA driver reserves at boot; None if unknown, because no pod runs there."""
    pod: Resources | None
    """What the system, the kubelet and the daemons leave for a stage's pod; None if no stage runs on this type."""
    price: Price | None
    """Price of an instance; None if no public list has one, as for types that are sold in Capacity Blocks alone."""

    @property
    def pod_resources(self) -> Resources:
        """Resources of a stage's pod, which takes the whole node, so that each pod has its own node.

        Raises `RecipeError` for a type on which no stage runs.
        """
        if self.pod is None:
            raise RecipeError(f"no stage runs on {self.name}: infra/shapes.json has no `pod` resources for it")
        return self.pod


@cache
def read_shapes() -> dict[str, Shape]:
    """The table of instance types, by name."""
    table = json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["shapes"]
    return {name: _read_shape(name, facts) for name, facts in table.items()}


def find_shape(name: str) -> Shape:
    """Raises `RecipeError` for a type that is not in the table."""
    shapes = read_shapes()
    if name not in shapes:
        raise RecipeError(
            f"instance type {name!r} is not in infra/shapes.json, which lists {', '.join(shapes)}. Add it there"
        )
    return shapes[name]


def _read_shape(name: str, facts: dict[str, Any]) -> Shape:
    kept = {each.name: facts[each.name] for each in fields(Shape) if each.name != "name"}
    counted = {key: facts[key] for key in ("neuron_devices", "neuron_cores", "efa_cards")}
    pod = Resources(**facts["pod"], **counted) if facts["pod"] else None
    return Shape(name, **kept | {"pod": pod, "price": Price(**facts["price"]) if facts["price"] else None})
