"""The device mesh of a run: every computation with ranks is in this module."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from services.common.hardware.instance_types import TRN1, family_of
from services.common.recipe.schema import Recipe, key_value_copies

Axis = Literal["data", "tensor", "key_value"]
AXES: tuple[Axis, ...] = ("data", "tensor", "key_value")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective. A worker that waits for another worker's slowest compilation stays below it."""


@dataclass(frozen=True)
class Mesh:
    """One rank's position in the grid of workers: rank = data index x tensor_parallel_size + tensor index.

    Ranks that differ in their tensor index alone hold the shards of one model replica. They are neighbours, so they lie
    on one node as long as `tensor_parallel_size` divides the workers of a node. Where a replica has more ranks than
    key-value heads, `key_value_copies` of its ranks hold the same heads: they form the axis `key_value`, which is a
    part of the axis `tensor`. Those ranks are neighbours too, or, with `are_copies_apart`, their distance is the number
    of shards of key-value heads.
    """

    rank: int
    data_parallel_size: int
    tensor_parallel_size: int = 1
    key_value_copies: int = 1
    are_copies_apart: bool = False
    takes_turns: bool = False
    """Whether replicas take the items of a global batch in turns, so that those of one turn are neighbours in the tree
    of sums. Otherwise a replica's own items are neighbours."""

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
        """Return this rank's index along the axis. No graph may contain it: all ranks have to trace the same graph."""
        if axis == "data":
            return self.rank // self.tensor_parallel_size
        if axis == "key_value" and self.are_copies_apart:
            return self.rank % self.tensor_parallel_size // self._num_key_value_shards
        return self.rank % self.size(axis)

    @property
    def key_value_shard(self) -> int:
        """Index of the shard of key-value heads that this rank holds."""
        tensor_index = self.index("tensor")
        if self.are_copies_apart:
            return tensor_index % self._num_key_value_shards
        return tensor_index // self.key_value_copies

    @property
    def query_shard(self) -> int:
        """Index of the shard of query heads that this rank holds: they attend to its key-value heads."""
        return self.key_value_shard * self.key_value_copies + self.index("key_value")

    @property
    def _num_key_value_shards(self) -> int:
        return self.tensor_parallel_size // self.key_value_copies

    def groups(self, axis: Axis) -> list[list[int]]:
        """Return the groups of ranks along the axis. Every rank is in one group, and all workers get the same list."""
        ranks = range(self.world_size)
        if axis == "data":
            return [list(ranks[first :: self.tensor_parallel_size]) for first in range(self.tensor_parallel_size)]
        if axis == "key_value" and self.are_copies_apart:
            models, step = self.groups("tensor"), self._num_key_value_shards
            return [model[first::step] for model in models for first in range(step)]
        size = self.size(axis)
        return [list(ranks[first : first + size]) for first in ranks[::size]]

    def group(self, axis: Axis) -> list[int]:
        """Return the ranks of this worker's own group along the axis, in the order of their index."""
        return next(group for group in self.groups(axis) if self.rank in group)

    def share(self, count: int) -> range:
        """Return the items of a global batch of `count` items that this rank's model replica takes.

        Raises `ValueError` where the replicas cannot share them evenly.
        """
        if count % self.data_parallel_size:
            raise ValueError(f"{count} items cannot be shared evenly by {self.data_parallel_size} model replicas")
        index, size = self.index("data"), count // self.data_parallel_size
        if self.takes_turns:
            return range(index, count, self.data_parallel_size)
        return range(index * size, (index + 1) * size)


def make_mesh(recipe: Recipe, rank: int, world_size: int) -> Mesh:
    """Make the mesh of the recipe's run, as `rank` sees it."""
    tensor_parallel_size = recipe.parallel.tensor_parallel_size
    return Mesh(
        rank,
        data_parallel_size=world_size // tensor_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
        key_value_copies=key_value_copies(recipe),
        are_copies_apart=_are_copies_apart(recipe),
        takes_turns=recipe.parallel.zero_stage >= 2,
    )


def _are_copies_apart(recipe: Recipe) -> bool:
    """Whether the ranks that hold copies of a key-value head are apart, which they are on trn1 alone.

    A trn1 node links its cores in rings of 4 whose members are 8 cores apart, and neuronx-distributed forms the groups
    of key-value heads along these rings (`initialize_model_parallel` and `arrange_kv_groups`). On trn2 they are
    neighbours.
    """
    return recipe.parallel.device == "xla" and family_of(recipe.cluster.trainer_instance_type).startswith(TRN1)
