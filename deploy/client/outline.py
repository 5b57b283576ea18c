"""The outline of a recipe: the few values that the client needs. The stage's image checks all the others.

The client's checkout and the image may be of different versions: a key that is new in the image is unknown here.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ValidationError

from services.common.errors import RecipeError
from services.common.recipe.cluster import Cluster
from services.common.recipe.compilation import Compile
from services.common.recipe.memory_estimate import checkpoint_bytes_of
from services.common.recipe.schema import Batch, Model, Parallel, Stage


class OutlineTrain(BaseModel, frozen=True, strict=True):
    """The one key that the client needs of the section `train`."""

    time_limit_seconds: float | None = None


class Outline(BaseModel, frozen=True, strict=True):
    """A recipe's name, and the values that decide how many nodes it needs, and for how long."""

    name: str
    parallel: Parallel = Parallel()
    batch: Batch = Batch(micro_batch_size=1, global_batch_size=1)
    compile: Compile = Compile()
    train: OutlineTrain = OutlineTrain()
    cluster: Cluster = Cluster()
    model: dict[str, Any] = {}
    """The unchecked section `model`: the image may know a preset that this checkout does not."""

    @property
    def checkpoint_gb(self) -> float | None:
        """Size of a checkpoint in 10^9 bytes; None where this checkout does not know the model."""
        try:
            return checkpoint_bytes_of(Model.model_validate(self.model, extra="ignore")) / 1e9
        except ValidationError:
            return None

    @property
    def has_compile_tasks(self) -> bool:
        """Whether the recipe's graphs are compiled for Neuron, each by its own task."""
        return self.compile.enabled and self.parallel.device == "xla"

    def nodes_of(self, stage: Stage) -> int:
        """Number of nodes in the stage's gang."""
        return self.cluster.nodes_of(stage, self.parallel.num_workers)

    def describe_topology(self, stage: str, nodes: int, unit: str) -> str:
        """Describe the stage's workers on so many nodes; `unit` is the target's word for nodes, such as `pods`."""
        if stage == "tokenizer":
            return f"{nodes} {unit}"
        models = self.parallel.data_parallel_size
        workers = f"data-parallel degree {models} x tensor-parallel degree {self.parallel.tensor_parallel_size}"
        if stage == "compiler":
            return f"{nodes} {unit}, for a trainer of {workers}"
        micro_batches = self.batch.num_micro_batches // models
        return (
            f"{nodes} {unit} x {self.cluster.trainer_workers_per_node} workers: {workers}, "
            f"{micro_batches} micro-batches of {self.batch.micro_batch_size} per model and step"
        )

    def data_parallel_size_on(self, nodes: int) -> int:
        """Number of models that the trainer's workers form on so many nodes.

        Raises `RecipeError` where some workers are left over.
        """
        per_node, parts = self.cluster.trainer_workers_per_node, self.parallel.tensor_parallel_size
        models, rest = divmod(nodes * per_node, parts)
        if rest:
            step = parts // math.gcd(per_node, parts)
            raise RecipeError(
                f"NODES={nodes}: {nodes * per_node} workers ({per_node} a node, cluster.trainer_workers_per_node) do "
                f"not form whole models of {parts} workers each (parallel.tensor_parallel_size). NODES must be a "
                f"multiple of {step}"
            )
        return models
