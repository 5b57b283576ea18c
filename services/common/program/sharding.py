"""Tensor-parallel shards of parameters: which part of a full tensor a rank holds (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from services.common.program.mesh import Axis, Mesh

HeadKind = Literal["query", "key_value"]
"""Kind of attention heads that a weight's sharded dimension consists of: key-value heads may have copies."""


@dataclass(frozen=True)
class Sharding:
    """Describes how a parameter is sharded over the tensor axis, and which shard this rank holds."""

    dim: int | None = None
    """Sharded dimension; None where every rank of the tensor axis holds the full tensor."""
    num_shards: int = 1
    shard: int = 0
    """Index of this rank's shard, from 0."""
    sum_axis: Axis | None = None
    """Axis along which the ranks hold the same shard and partial gradients of it, which have to be summed."""
    heads: HeadKind | None = None
    """Kind of heads that the sharded dimension consists of; None where it consists of none."""
    length: int | None = None
    """Length of the full tensor along `dim`, where equal shards exceed it: the rest of the last shards is padding."""

    def of(self, mesh: Mesh) -> Sharding:
        """Return the sharding of the same parameter on another rank, whose mesh this is."""
        return self if self.dim is None else shard_along(mesh, self.dim, self.heads, self.length)

    def box(self, shape: torch.Size) -> tuple[tuple[int, int], ...]:
        """Return the range of indices that a shard of this shape covers along each dimension of the full tensor,
        without padding. A shard that is only padding has an empty range.
        """
        firsts = (self.shard * length if dim == self.dim else 0 for dim, length in enumerate(shape))
        full = self.full_shape(shape)
        return tuple(
            (min(first, end), min(first + length, end)) for first, length, end in zip(firsts, shape, full, strict=True)
        )

    def full_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the full tensor, without padding, whose shards have this shape."""
        return torch.Size(
            (self.length or length * self.num_shards) if dim == self.dim else length for dim, length in enumerate(shape)
        )


def shard_along(mesh: Mesh, dim: int, heads: HeadKind | None = None, length: int | None = None) -> Sharding:
    """Shard a parameter along `dim`, one shard for each rank of the tensor axis. See `Sharding` for `length`.

    Where there are more ranks than key-value heads, the ranks along the axis `key_value` hold copies of one shard of
    key-value heads. Each rank holds query heads that attend to its key-value heads.
    """
    num_copies = mesh.key_value_copies if heads == "key_value" else 1
    sum_axis: Axis | None = "key_value" if num_copies > 1 else None
    if mesh.tensor_parallel_size == num_copies:
        return Sharding(sum_axis=sum_axis)
    shard = {None: mesh.index("tensor"), "query": mesh.query_shard, "key_value": mesh.key_value_shard}[heads]
    return Sharding(dim, mesh.tensor_parallel_size // num_copies, shard, sum_axis, heads, length)
