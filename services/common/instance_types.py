"""EC2 instance types whose nodes a plan can judge: what each has, and a hint of what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB, GIB = 2**20, 2**30
TRN1 = "trn1"


@dataclass(frozen=True)
class InstanceType:
    """Memory and peak are those of AWS Neuron's documentation, "Trn1 architecture" and "Trainium2 architecture"."""

    name: str
    workers: int
    """Logical NeuronCores of a node, each with a worker of its own."""
    worker_memory_bytes: int
    peak_flops_per_second: float
    """Of a node, in dense bfloat16."""
    dollars_per_hour: float
    """Of a node on demand. A hint: it differs by region, and nobody keeps it up to date."""
    price_source: str
    logical_core_size: int | None = None
    """Physical NeuronCores that make one of a worker's (Neuron's LNC); None where there is no choice."""

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


INSTANCE_TYPES = {
    each.name: each
    for each in (
        InstanceType(
            name="trn1.32xlarge",
            workers=32,  # 16 Trainium chips of 2 cores and 32 GiB
            worker_memory_bytes=16 * GIB,
            peak_flops_per_second=3_040e12,
            dollars_per_hour=21.50,
            price_source="us-east-1, a third party's list of June 2026",
        ),
        InstanceType(
            name="trn2.48xlarge",
            workers=64,  # 16 Trainium2 chips of 8 cores and 96 GiB; two cores make one by default (LNC 2)
            logical_core_size=2,
            worker_memory_bytes=24 * GIB,
            peak_flops_per_second=16 * 667e12,
            dollars_per_hour=35.76,
            price_source="us-east-1, a third party's list of February 2026",
        ),
    )
}


def family_of(instance_type: str | None) -> str:
    """What is before the dot, which neuronx-cc calls its target: that of trn1 where a recipe names no instance type."""
    return (instance_type or TRN1).partition(".")[0]
