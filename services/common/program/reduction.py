"""Sums over micro-batches whose bits do not depend on the number of workers.

A global batch is M micro-batches of a fixed size. Rank r of the W ranks of the data axis holds the r-th M / W of them,
in order. With M and W powers of two they are summed in one fixed binary tree: neighbours within a rank, then ranks at
distance 1, 2, 4, ... The tree is the same for every W, and so are the bits, because a float addition is commutative
although it is not associative. It is the same again where ranks take turns: the W micro-batches of a turn are
neighbours, which the ranks sum first, and then turns are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Sum(Protocol):
    """A sum over tensors that come one after the other. It may overwrite the tensors that it is given."""

    def add(self, leaf: Tensor) -> None:
        """Add a tensor to the sum."""
        ...

    def result(self) -> Tensor:
        """Return the sum, and start another one."""
        ...


class TreeSum:
    """A `Sum` in a binary tree: adds tensors pairwise as they come, holding log2 of their number."""

    def __init__(self) -> None:
        self._partial: list[tuple[int, Tensor]] = []  # (number of leaves, their sum), with falling numbers of leaves

    def add(self, leaf: Tensor) -> None:
        size = 1
        while self._partial and self._partial[-1][0] == size:
            _, left = self._partial.pop()
            leaf = left.add_(leaf)
            size *= 2
        self._partial.append((size, leaf))

    def result(self) -> Tensor:
        """Return the sum, and start another one.

        Where the number of leaves is no power of two, the partial sums are added from the smallest up.
        """
        _, total = self._partial.pop()
        while self._partial:
            _, left = self._partial.pop()
            total = left.add_(total)
        return total


class RunningSum:
    """A `Sum` in the order in which the tensors come, holding one tensor."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, leaf: Tensor) -> None:
        self._total = leaf if self._total is None else self._total.add_(leaf)

    def result(self) -> Tensor:
        total, self._total = self._total, None
        assert total is not None
        return total


class HeldSum:
    """A running `Sum` in memory that it keeps from step to step, so that every addition is the same graph.

    `zeros` is that memory, a tensor of zeros on the device.
    """

    def __init__(self, zeros: Tensor) -> None:
        self._total = zeros

    def add(self, leaf: Tensor) -> None:
        self._total.add_(leaf)

    def result(self) -> Tensor:
        total = self._total.clone()
        self._total.zero_()
        return total


class WorkersSum:
    """A sum over the micro-batches of all ranks: this rank's sum is summed over the ranks or, where they take turns,
    each tensor. `reduce` starts to sum a tensor over the ranks, and returns the function that waits for the result.
    """

    def __init__(self, own: Sum, reduce: Callable[[Tensor], Callable[[], Tensor]], takes_turns: bool) -> None:
        self._own, self._reduce, self._takes_turns = own, reduce, takes_turns

    def start_to_add(self, leaf: Tensor) -> Callable[[], None]:
        """Start to add a tensor to the sum, and return the function that ends it, to be called in the same order."""
        if not self._takes_turns:
            self._own.add(leaf)
            return lambda: None
        finish = self._reduce(leaf)
        return lambda: self._own.add(finish())

    def result(self) -> Tensor:
        """Return the sum, and start another one."""
        return self._own.result() if self._takes_turns else self._reduce(self._own.result())()


def sum_in_tree(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' parts, given in the order of their ranks: the upper levels of the tree.

    The parts are not overwritten: selective activation checkpointing keeps what a collective returned, and raises an
    error where that was written to.
    """
    tree, num_paired = TreeSum(), len(parts) // 2 * 2
    for left, right in zip(parts[:num_paired:2], parts[1:num_paired:2], strict=True):
        tree.add(left + right)
    for part in parts[num_paired:]:  # the last of an odd number
        tree.add(part)
    return tree.result()
