"""Reads instance types with accelerators, their approximate prices, and the size of the stacks' file system.

They are in `infra/shapes.json`, which every image has and which names the sources of its numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

MIB, GIB = 2**20, 2**30
TERA = 10**12
TRN1 = "trn1"
Accelerators = Literal["NeuronCores", "GPUs"]
SHAPES_JSON = Path(__file__).parents[3] / "infra/shapes.json"


@dataclass(frozen=True)
class InstanceType:
    """An instance type with accelerators: NeuronCores or NVIDIA GPUs."""

    name: str
    accelerators: Accelerators
    """Kind of accelerator on which the node's workers compute."""
    workers: int
    """Number of logical NeuronCores or GPUs of a node, and of its workers."""
    chips: int
    """Number of Neuron devices or GPUs of a node."""
    worker_memory_bytes: int
    peak_flops_per_second: float
    """Peak FLOP/s of a node, in dense bfloat16."""
    network_bytes_per_second: float
    """Bytes per second that a node sends to other nodes at most."""
    dollars_per_hour: float | None
    """Approximate on-demand price of a node, which differs by region and is not kept up to date; None if unknown."""
    price_source: str | None
    shared_memory_bytes: int | None
    """Size of /dev/shm in a stage's container on a node; None for a type that the stacks have no nodes of."""
    logical_core_size: int | None = None
    """Physical NeuronCores in a worker's logical one (Neuron's LNC); None where there is no choice."""

    @property
    def worker_peak_flops_per_second(self) -> float:
        """Peak FLOP/s of the accelerator that one worker computes on, in dense bfloat16."""
        return self.peak_flops_per_second / self.workers

    def divided_for(self, workers_per_node: int) -> InstanceType:
        """Return the node with logical cores of one physical core where so many workers need it, else as it is."""
        size = self.logical_core_size
        if workers_per_node <= self.workers or size is None or size == 1:
            return self
        return replace(
            self,
            workers=self.workers * size,
            worker_memory_bytes=self.worker_memory_bytes // size,
            logical_core_size=1,
        )


@dataclass(frozen=True)
class LustreSize:
    """The size of an FSx for Lustre file system, which determines its speed."""

    gib: int
    megabytes_per_second_per_tib: int
    """AWS's PerUnitStorageThroughput: 125, 250, 500 or 1000 for PERSISTENT_2."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second that all nodes together can write: the provisioned baseline, without bursts."""
        return self.gib / 1024 * self.megabytes_per_second_per_tib * 10**6

    def __str__(self) -> str:
        return f"{self.gib:,} GiB at {self.megabytes_per_second_per_tib:,} MB/s/TiB"


@cache
def read_instance_types() -> dict[str, InstanceType]:
    """Return the types with NeuronCores or GPUs, by name."""
    return {
        name: _read_instance_type(name, facts)
        for name, facts in _read_table()["shapes"].items()
        if facts["neuron_cores"] or facts["gpus"]
    }


def family_of(instance_type: str | None) -> str:
    """Return the type's family, the part before the dot, which is neuronx-cc's target; trn1 without a type."""
    return (instance_type or TRN1).partition(".")[0]


def default_lustre_size() -> LustreSize:
    """Return the size of the file system that both stacks make without the variable `fsx`."""
    return LustreSize(**_read_table()["file_system"])


@cache
def _read_table() -> dict[str, Any]:
    return dict(json.loads(SHAPES_JSON.read_text(encoding="utf-8")))


def _read_instance_type(name: str, facts: dict[str, Any]) -> InstanceType:
    price, core_size, pod = facts["price"], facts["logical_core_size"], facts.get("pod")
    workers = facts["gpus"] or facts["neuron_cores"] // (core_size or 1)
    chips = facts["gpus"] or facts["neuron_devices"]
    return InstanceType(
        name=name,
        accelerators="GPUs" if facts["gpus"] else "NeuronCores",
        workers=workers,
        chips=chips,
        worker_memory_bytes=chips * facts["device_memory_gib"] * GIB // workers,
        peak_flops_per_second=float(facts["peak_bf16_tflops"] * TERA),
        network_bytes_per_second=facts["network_gigabits_per_second"] * 10**9 / 8,
        dollars_per_hour=price["dollars_per_hour"] if price else None,
        price_source=f"{price['region']}, {price['source']}" if price else None,
        shared_memory_bytes=pod["shared_memory_gib"] * GIB if pod else None,
        logical_core_size=core_size,
    )
