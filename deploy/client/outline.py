"""The outline of a recipe: the little that the client reads in it. The stage's own image judges the rest.

The client's checkout and the image may know different recipes: a key that is new in the image is unknown here.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.errors import RecipeError
from services.common.recipe.file import read_values
from services.common.recipe.memory_estimate import checkpoint_bytes_of
from services.common.recipe.schema import Cluster, Model, Positive, Stage


class _Outline(BaseModel):
    """As much of a section as is named here; what else it has is not looked at."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class OutlineParallel(_Outline):
    data_parallel_size: Positive = 1
    tensor_parallel_size: Positive = 1
    device: str = "cpu"

    @property
    def num_workers(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


class OutlineBatch(_Outline):
    micro_batch_size: Positive = 1
    global_batch_size: Positive = 1

    @property
    def num_micro_batches(self) -> int:
        """1, which no two workers share, where the sizes are not in the recipe."""
        return self.global_batch_size // self.micro_batch_size


class OutlineCompile(_Outline):
    enabled: bool = True
    trace_on: str = "device"
    num_workers: Positive = 5
    task_cpus: Positive = 8
    task_memory_gib: Annotated[float, Field(gt=0)] = 32.0


class OutlineModel(Model, extra="ignore"):
    """The whole section: the size of a checkpoint follows from it."""


class OutlineTrain(_Outline):
    time_limit_seconds: float | None = None


class OutlineCluster(Cluster, extra="ignore"):
    """The whole section: it is about nothing but nodes."""


class Outline(_Outline):
    """A recipe's name, and what its nodes and their time follow from."""

    name: str
    parallel: OutlineParallel = OutlineParallel()
    batch: OutlineBatch = OutlineBatch()
    compile: OutlineCompile = OutlineCompile()
    train: OutlineTrain = OutlineTrain()
    cluster: OutlineCluster = OutlineCluster()
    model: dict[str, Any] = {}
    """The section as it is written: a preset that is new in the image is none here."""

    @property
    def checkpoint_gb(self) -> float | None:
        """Size of a checkpoint in 10^9 bytes; None where this checkout does not know the model."""
        try:
            return checkpoint_bytes_of(OutlineModel.model_validate(self.model)) / 1e9
        except ValidationError:
            return None

    @property
    def has_compile_tasks(self) -> bool:
        """Are its graphs compiled as tasks, for Neuron?"""
        return self.compile.enabled and self.parallel.device == "xla"

    def nodes_of(self, stage: Stage) -> int:
        """Nodes of the stage's gang."""
        return self.cluster.nodes_of(stage, self.parallel.num_workers)

    def describe_topology(self, stage: str, nodes: int, unit: str) -> str:
        """What NODES makes of the recipe; a target calls a node's part of it by its own name."""
        if stage != "trainer":
            return f"{nodes} {unit}"
        models = self.parallel.data_parallel_size
        micro_batches = self.batch.num_micro_batches // models
        return (
            f"{nodes} {unit} x {self.cluster.trainer_workers_per_node} workers: data-parallel degree {models} x "
            f"tensor-parallel degree {self.parallel.tensor_parallel_size}, "
            f"{micro_batches} micro-batches of {self.batch.micro_batch_size} per model and step"
        )

    def data_parallel_size_on(self, nodes: int) -> int:
        """Models of the trainer on so many nodes. Raises `RecipeError` where they are not whole."""
        per_node, parts = self.cluster.trainer_workers_per_node, self.parallel.tensor_parallel_size
        models, rest = divmod(nodes * per_node, parts)
        if rest:
            step = parts // math.gcd(per_node, parts)
            raise RecipeError(
                f"NODES={nodes}: its {nodes * per_node} workers ({per_node} a node, cluster.trainer_workers_per_node) "
                f"are no whole models of parallel.tensor_parallel_size {parts} workers. "
                f"NODES must be a multiple of {step}"
            )
        return models


def read_outline(file: Path, overrides: dict[str, str]) -> Outline:
    """Raises `RecipeError` for what is no TOML, and for a number of nodes that is none."""
    try:
        return Outline.model_validate(read_values(file, overrides))
    except ValidationError as error:
        told = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}, got {each['input']!r}" for each in error.errors()]
        raise RecipeError(f"{file}: the nodes of a stage cannot be read from it: {'; '.join(told)}") from error


def read_outline_of_text(text: str, overrides: dict[str, str]) -> Outline:
    """Of a recipe that is in no file."""
    with tempfile.TemporaryDirectory(prefix="millrace-recipe-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, encoding="utf-8")
        return read_outline(file, overrides)
