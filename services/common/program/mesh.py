"""Where a worker stands among the others: all rank arithmetic there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.instance_types import TRN1, family_of
from services.common.recipe import Recipe, key_value_copies

Axis = Literal["data", "tensor", "key_value"]
AXES: tuple[Axis, ...] = ("data", "tensor", "key_value")


@dataclass(frozen=True)
class Mesh:
    """The workers of a run as a grid: rank = data index x tensor_parallel_size + tensor index.

    Workers that differ in their tensor index alone hold the parts of one model, so they are neighbours: of one node, as
    long as `tensor_parallel_size` divides a node's workers. Where there are more of them than key-value heads,
    `key_value_copies` of them hold the same head: the axis `key_value`, a part of the axis `tensor`. They are
    neighbours, or as far from each other as there are heads (`are_copies_apart`).
    """

    rank: int
    data_parallel_size: int
    tensor_parallel_size: int = 1
    key_value_copies: int = 1
    are_copies_apart: bool = False

    def __post_init__(self) -> None:
        if min(self.data_parallel_size, self.tensor_parallel_size) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is none of {self.data_parallel_size} x {self.tensor_parallel_size} workers"
            )
        if self.key_value_copies < 1 or self.tensor_parallel_size % self.key_value_copies:
            raise ValueError(
                f"{self.key_value_copies} copies of a key-value head do not divide the {self.tensor_parallel_size} "
                f"workers of a model"
            )

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    def size(self, axis: Axis) -> int:
        return {
            "data": self.data_parallel_size,
            "tensor": self.tensor_parallel_size,
            "key_value": self.key_value_copies,
        }[axis]

    def index(self, axis: Axis) -> int:
        """This worker's place along the axis. A graph must not contain it: all ranks then trace the same one."""
        if axis == "data":
            return self.rank // self.tensor_parallel_size
        if axis == "key_value" and self.are_copies_apart:
            return self.rank % self.tensor_parallel_size // self._num_key_value_parts
        return self.rank % self.size(axis)

    @property
    def key_value_part(self) -> int:
        """Which part of the key-value heads this worker holds."""
        tensor_index = self.index("tensor")
        return (
            tensor_index % self._num_key_value_parts if self.are_copies_apart else tensor_index // self.key_value_copies
        )

    @property
    def query_part(self) -> int:
        """Which part of the query heads this worker holds: one of those that look at its key-value heads."""
        return self.key_value_part * self.key_value_copies + self.index("key_value")

    @property
    def _num_key_value_parts(self) -> int:
        return self.tensor_parallel_size // self.key_value_copies

    def groups(self, axis: Axis) -> list[list[int]]:
        """Ranks along the axis, each rank in one group, every worker's list the same."""
        ranks = range(self.world_size)
        if axis == "data":
            return [list(ranks[first :: self.tensor_parallel_size]) for first in range(self.tensor_parallel_size)]
        if axis == "key_value" and self.are_copies_apart:
            models, step = self.groups("tensor"), self._num_key_value_parts
            return [model[first::step] for model in models for first in range(step)]
        size = self.size(axis)
        return [list(ranks[first : first + size]) for first in ranks[::size]]

    def group(self, axis: Axis) -> list[int]:
        """Ranks of this worker's own group, in the order of their index."""
        return next(group for group in self.groups(axis) if self.rank in group)

    def share(self, count: int) -> range:
        """Which of `count` items of a global batch this worker's model takes. Raises `ValueError` if uneven."""
        if count % self.data_parallel_size:
            raise ValueError(f"{count} items cannot be shared evenly by {self.data_parallel_size} models")
        size = count // self.data_parallel_size
        first = self.index("data") * size
        return range(first, first + size)


def make_mesh(recipe: Recipe, rank: int, world_size: int) -> Mesh:
    """Where a worker of the recipe's run stands."""
    tensor_parallel_size = recipe.parallel.tensor_parallel_size
    return Mesh(
        rank,
        data_parallel_size=world_size // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        key_value_copies=key_value_copies(recipe),
        are_copies_apart=_are_copies_apart(recipe),
    )


def _are_copies_apart(recipe: Recipe) -> bool:
    """Cores of trn1 are linked in rings of 4 that are 8 apart, and its groups of 4 are those: neuronx-distributed,
    `initialize_model_parallel` and `arrange_kv_groups`. On trn2 copies are neighbours."""
    return recipe.parallel.device == "xla" and family_of(recipe.cluster.trainer_instance_type).startswith(TRN1)
