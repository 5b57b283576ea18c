"""Where a worker stands among the others: all rank arithmetic there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["data", "tensor"]
AXES: tuple[Axis, ...] = ("data", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The workers of a run as a grid: rank = data index x tensor_parallel_size + tensor index.

    Workers that differ in their tensor index alone hold the parts of one model, so they are neighbours: of one node, as
    long as `tensor_parallel_size` divides a node's workers.
    """

    rank: int
    data_parallel_size: int
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if min(self.data_parallel_size, self.tensor_parallel_size) < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is none of {self.data_parallel_size} x {self.tensor_parallel_size} workers"
            )

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    def size(self, axis: Axis) -> int:
        return self.data_parallel_size if axis == "data" else self.tensor_parallel_size

    def index(self, axis: Axis) -> int:
        """This worker's place along the axis. A graph must not contain it: all ranks then trace the same one."""
        data_index, tensor_index = divmod(self.rank, self.tensor_parallel_size)
        return data_index if axis == "data" else tensor_index

    def groups(self, axis: Axis) -> list[list[int]]:
        """Ranks along the axis, each rank in one group, every worker's list the same."""
        ranks, tensor = range(self.world_size), self.tensor_parallel_size
        if axis == "data":
            return [list(ranks[first::tensor]) for first in range(tensor)]
        return [list(ranks[first : first + tensor]) for first in ranks[::tensor]]

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
