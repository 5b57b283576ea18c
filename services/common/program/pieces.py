"""Collectives of large tensors, cut into calls of a bounded size.

A device may compute wrong numbers, or lack a buffer, where one collective moves too much. A piece takes some elements
of each rank's shard, so that every element of the result is the sum of the same elements as with one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Collective = Callable[[Tensor, int], Tensor]
"""A collective, called with a tensor and the dimension along which the ranks' shards lie."""


def all_gather_in_pieces(all_gather: Collective, x: Tensor, size: int, dim: int, max_bytes: int) -> Tensor:
    """Return `all_gather(x, dim)` over `size` ranks, by calls whose results have at most `max_bytes` bytes."""
    length = _piece_length(x.numel(), size * x.element_size(), max_bytes)
    if size == 1 or length == x.numel():
        return all_gather(x, dim)
    shards = [all_gather(piece, 0).view(size, -1) for piece in x.flatten().split(length)]
    return torch.cat(shards, dim=1).view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter_in_pieces(reduce_scatter: Collective, x: Tensor, size: int, dim: int, max_bytes: int) -> Tensor:
    """Return `reduce_scatter(x, dim)` over `size` ranks, by calls that take at most `max_bytes` bytes each."""
    shard_length = x.numel() // size
    length = _piece_length(shard_length, size * x.element_size(), max_bytes)
    if size == 1 or length == shard_length:
        return reduce_scatter(x, dim)
    shards = x.unflatten(dim, (size, -1)).movedim(dim, 0)
    pieces = shards.reshape(size, -1).split(length, dim=1)
    return torch.cat([reduce_scatter(piece.flatten(), 0) for piece in pieces]).view(shards.shape[1:])


def _piece_length(count: int, bytes_of_one: int, max_bytes: int) -> int:
    """Return the number of a shard's elements in a piece, for the fewest pieces of equal length within `max_bytes`."""
    num_pieces = math.ceil(count * bytes_of_one / max_bytes)
    return count if num_pieces <= 1 else min(math.ceil(count / num_pieces), max(1, max_bytes // bytes_of_one))
