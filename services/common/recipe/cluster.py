"""The recipe's section `[cluster]`: the nodes of the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import field_validator

from services.common.hardware.instance_types import read_instance_types
from services.common.recipe.section import Positive, Section

if TYPE_CHECKING:
    from services.common.recipe.schema import Stage


class Cluster(Section):
    """Nodes of the stages on a cluster, where a node is a pod and a node of Ray. One machine ignores this section."""

    tokenizer_nodes: Positive = 1
    """Number of nodes that share the tokenizer's tasks."""
    compiler_nodes: Positive = 1
    """Number of nodes of the compiler stage. Default: one, or as many as `compile.num_workers` Neuron tasks need."""
    trainer_workers_per_node: Positive = 1
    """Workers that share a node. The trainer's nodes are data_parallel_size x tensor_parallel_size over this number."""
    trainer_instance_type: str | None = None
    """EC2 type of the trainer's nodes, with NeuronCores or GPUs. `plan` needs it for memory, peak FLOP/s and price."""
    min_nodes: Positive | None = None
    """Fewest nodes with which the trainer goes on when lost nodes are not replaced. Without it, it waits for all."""

    @field_validator("trainer_instance_type")
    @classmethod
    def _is_a_known_instance_type(cls, value: str | None) -> str | None:
        if value is not None and value not in read_instance_types():
            raise ValueError(f"unknown instance type {value!r}; known: {', '.join(read_instance_types())}")
        return value

    @property
    def has_compiler_nodes(self) -> bool:
        """Tell whether the recipe sets `compiler_nodes`."""
        return "compiler_nodes" in self.model_fields_set

    def fewer_nodes(self, num_workers: int, tensor_parallel_size: int, num_micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of nodes with which the trainer may go on after a loss, largest first.

        There are none without `min_nodes`. Each number gives whole models with equal numbers of micro-batches.
        """
        if self.min_nodes is None:
            return ()

        def shares_evenly(nodes: int) -> bool:
            models, rest = divmod(nodes * self.trainer_workers_per_node, tensor_parallel_size)
            return models > 0 and rest == 0 and num_micro_batches % models == 0

        return tuple(filter(shares_evenly, range(self.nodes_of("trainer", num_workers) - 1, self.min_nodes - 1, -1)))

    def nodes_of(self, stage: Stage, num_workers: int) -> int:
        """Return the number of nodes of a stage; `num_workers` counts the trainer's workers."""
        if stage == "trainer":
            return num_workers // self.trainer_workers_per_node
        return self.tokenizer_nodes if stage == "tokenizer" else self.compiler_nodes
