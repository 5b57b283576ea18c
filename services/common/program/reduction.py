"""Sums over micro-batches whose bits do not depend on the number of workers.

A global batch is M micro-batches of a fixed size, M a power of two. Worker r of W holds the r-th M / W of
them, in order. They are summed in one fixed binary tree: neighbours within a worker, then workers at
distance 1, 2, 4, ... The tree is the same for every W, and so are the bits, because a float addition
is commutative although it is not associative.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class TreeSum:
    """Sums a power-of-two number of tensors pairwise as they come, holding log2 of them. Consumes its inputs."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensor]] = []  # (how many leaves it sums, the sum), sizes strictly falling

    def add(self, leaf: Tensor) -> None:
        size = 1
        while self._partial and self._partial[-1][0] == size:
            _, left = self._partial.pop()
            leaf = left.add_(leaf)
            size *= 2
        self._partial.append((size, leaf))

    def result(self) -> Tensor:
        """The sum; leaves that do not fill the tree are added from the smallest partial sum up."""
        _, total = self._partial.pop()
        while self._partial:
            _, left = self._partial.pop()
            total = left.add_(total)
        return total


class RunningSum:
    """Sums tensors in the order in which they come, holding one. Consumes its inputs."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, leaf: Tensor) -> None:
        self._total = leaf if self._total is None else self._total.add_(leaf)

    def result(self) -> Tensor:
        """The sum; another one begins after it."""
        total, self._total = self._total, None
        assert total is not None
        return total


class HeldSum:
    """A running sum in memory that it is given, zeros, and keeps: to add the first tensor is what to add any is."""

    def __init__(self, zeros: Tensor) -> None:
        self._total = zeros

    def add(self, leaf: Tensor) -> None:
        self._total.add_(leaf)

    def result(self) -> Tensor:
        """The sum; another one begins after it."""
        total = self._total.clone()
        self._total.zero_()
        return total


def sum_in_tree(parts: Sequence[Tensor]) -> Tensor:
    """The upper levels of the tree: the sum of the workers' parts, in the order of their ranks.

    The parts stay as they are: selective activation checkpointing keeps what a collective returned, and refuses it when
    it was written to.
    """
    tree, num_paired = TreeSum(), len(parts) // 2 * 2
    for left, right in zip(parts[:num_paired:2], parts[1:num_paired:2], strict=True):
        tree.add(left + right)
    for part in parts[num_paired:]:  # the last of an odd number
        tree.add(part)
    return tree.result()
