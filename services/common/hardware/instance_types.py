"""EC2 instance types whose nodes a plan can judge: what each has, and a hint of what it costs.

The table is `infra/shapes.json`, which every image has. It also says where the numbers are from.
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
    """A node with accelerators: NeuronCores, or NVIDIA's GPUs."""

    name: str
    accelerators: Accelerators
    """Kind of accelerator that the workers of the node compute on."""
    workers: int
    """Logical NeuronCores or GPUs of a node, each with a worker of its own."""
    worker_memory_bytes: int
    peak_flops_per_second: float
    """Peak FLOP/s of a node, in dense bfloat16."""
    dollars_per_hour: float
    """Of a node on demand. A hint: it differs by region, and nobody keeps it up to date."""
    price_source: str
    logical_core_size: int | None = None
    """Physical NeuronCores that make one of a worker's (Neuron's LNC); None where there is no choice."""

    @property
    def worker_peak_flops_per_second(self) -> float:
        """Peak FLOP/s of the accelerator that one worker computes on, in dense bfloat16."""
        return self.peak_flops_per_second / self.workers

    def divided_for(self, workers_per_node: int) -> InstanceType:
        """The node with as small cores as so many workers need: as it is by default, or each physical core alone."""
        size = self.logical_core_size
        if workers_per_node <= self.workers or size is None or size == 1:
            return self
        return replace(
            self,
            workers=self.workers * size,
            worker_memory_bytes=self.worker_memory_bytes // size,
            logical_core_size=1,
        )


@cache
def read_instance_types() -> dict[str, InstanceType]:
    """The types that have NeuronCores or GPUs, by name."""
    return {
        name: _read_instance_type(name, facts)
        for name, facts in _read_shapes().items()
        if facts["neuron_cores"] or facts["gpus"]
    }


def read_pod_room(instance_type: str) -> tuple[int, float]:
    """CPUs and GiB that a node of a type in the table leaves to the one pod of a stage on it."""
    pod = _read_shapes()[instance_type]["pod"]
    return pod["cpus"], float(pod["memory_gib"])


def read_dollars_per_hour(instance_type: str) -> float:
    """A hint of what a node of a type in the table costs on demand."""
    return float(_read_shapes()[instance_type]["price"]["dollars_per_hour"])


def family_of(instance_type: str | None) -> str:
    """What is before the dot, which neuronx-cc calls its target: that of trn1 where a recipe names no instance type."""
    return (instance_type or TRN1).partition(".")[0]


@cache
def _read_shapes() -> dict[str, Any]:
    return dict(json.loads(SHAPES_JSON.read_text(encoding="utf-8"))["shapes"])


def _read_instance_type(name: str, facts: dict[str, Any]) -> InstanceType:
    price, core_size = facts["price"], facts["logical_core_size"]
    workers = facts["gpus"] or facts["neuron_cores"] // (core_size or 1)
    return InstanceType(
        name=name,
        accelerators="GPUs" if facts["gpus"] else "NeuronCores",
        workers=workers,
        worker_memory_bytes=(facts["gpus"] or facts["neuron_devices"]) * facts["device_memory_gib"] * GIB // workers,
        peak_flops_per_second=float(facts["peak_bf16_tflops"] * TERA),
        dollars_per_hour=price["dollars_per_hour"],
        price_source=f"{price['region']}, {price['source']}",
        logical_core_size=core_size,
    )
