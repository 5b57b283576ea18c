"""Collectives over tensors that are too large for one call, cut into pieces of a bounded size.

A device may compute wrong numbers, or have no buffer, where one collective moves too much. A piece has some elements of
each worker's share, so that each element of a result is the sum of the same ones as with one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Collective = Callable[[Tensor, int], Tensor]
"""Called with a tensor and the dimension along which the workers' shares lie."""


def all_gather_in_pieces(all_gather: Collective, x: Tensor, size: int, dim: int, max_bytes: int) -> Tensor:
    """The result of `all_gather(x, dim)` over `size` workers, by calls whose results have at most `max_bytes`."""
    length = _piece_length(x.numel(), size * x.element_size(), max_bytes)
    if size == 1 or length == x.numel():
        return all_gather(x, dim)
    shares = [all_gather(piece, 0).view(size, -1) for piece in x.flatten().split(length)]
    return torch.cat(shares, dim=1).view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter_in_pieces(reduce_scatter: Collective, x: Tensor, size: int, dim: int, max_bytes: int) -> Tensor:
    """The result of `reduce_scatter(x, dim)` over `size` workers, by calls that are given at most `max_bytes`."""
    share = x.numel() // size
    length = _piece_length(share, size * x.element_size(), max_bytes)
    if size == 1 or length == share:
        return reduce_scatter(x, dim)
    shares = x.unflatten(dim, (size, -1)).movedim(dim, 0)
    pieces = shares.reshape(size, -1).split(length, dim=1)
    return torch.cat([reduce_scatter(piece.flatten(), 0) for piece in pieces]).view(shares.shape[1:])


def _piece_length(count: int, bytes_of_one: int, max_bytes: int) -> int:
    """Elements of a share in each of equally long pieces, of as few as there can be; `count` where one is enough."""
    num_pieces = math.ceil(count * bytes_of_one / max_bytes)
    return count if num_pieces <= 1 else min(math.ceil(count / num_pieces), max(1, max_bytes // bytes_of_one))
