"""The sum over micro-batches has the same bits for every number of workers."""

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


def _sum_on(num_workers: int) -> Tensor:
    """Return the sum over all workers: each sums its share, and then their sums are summed."""
    share = MICRO_BATCHES // num_workers
    held = []
    for rank in range(num_workers):
        tree = TreeSum()
        for leaf in _leaves()[rank * share : (rank + 1) * share]:
            tree.add(leaf)
        held.append(tree.result())
    return sum_in_tree(held)


def test_the_bits_do_not_depend_on_the_number_of_workers() -> None:
    alone, in_a_row = _sum_on(1), torch.stack(_leaves()).cumsum(0)[-1]
    assert not torch.equal(alone, in_a_row)  # another order of additions has other bits
    for num_workers in (2, 4, 8, 16):
        assert torch.equal(_sum_on(num_workers), alone), num_workers


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 13])
def test_any_number_of_leaves_is_summed_and_the_workers_parts_stay_as_they_are(count: int) -> None:
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
