"""Sums over micro-batches: in a tree, whose bits test_parallel compares for numbers of workers, and in a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.common.program.reduction import RunningSum, TreeSum, sum_in_tree

MICRO_BATCHES = 16


def _leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    # The magnitudes are far apart, so that every other order of additions gives other bits.
    return [torch.randn(1000, generator=generator) * 10.0 ** (n % 7) for n in range(MICRO_BATCHES)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 13, 16])
def test_a_tree_of_leaves_has_the_bits_of_one_of_workers_parts_which_stay_as_they_are(count: int) -> None:
    parts, tree = _leaves()[:count], TreeSum()
    for leaf in _leaves()[:count]:
        tree.add(leaf)

    total = sum_in_tree(parts)
    assert torch.equal(total, tree.result())
    torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=1e-4, atol=0.1)
    assert all(torch.equal(part, leaf) for part, leaf in zip(parts, _leaves(), strict=False))


def test_a_running_sum_adds_in_a_row_and_holds_one_tensor() -> None:
    leaves, in_a_row = _leaves(), torch.zeros(1000)
    for leaf in leaves:
        in_a_row = in_a_row + leaf
    total = RunningSum()
    for leaf in leaves:
        total.add(leaf)
    summed = total.result()
    assert torch.equal(summed, in_a_row)
    assert summed is leaves[0]
