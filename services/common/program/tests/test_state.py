"""Slices of the state: what one sharding wrote, every other sharding can read."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from services.common.program.sharding import Sharding
from services.common.program.state import StateSlice, fill, overlap


def cut(shape: tuple[int, ...], dim: int | None, num_parts: int, num_shares: int) -> list[StateSlice]:
    """Cut a parameter into `num_parts` tensor-parallel shards, each of which `num_shares` data-parallel ranks share."""
    slices = []
    for part in range(num_parts if dim is not None else 1):
        lengths = [length // num_parts if axis == dim else length for axis, length in enumerate(shape)]
        box = Sharding(dim, num_parts, part).box(torch.Size(lengths))
        size = torch.Size(lengths).numel()
        bounds = [size * share // num_shares for share in range(num_shares + 1)]
        slices += [StateSlice("weight", "a.weight", box, *ends) for ends in itertools.pairwise(bounds)]
    return slices


def elements(full: torch.Tensor, piece: StateSlice) -> torch.Tensor:
    return full[tuple(slice(*side) for side in piece.box)].flatten()[piece.start : piece.stop]


LAYOUTS = [(None, 1, 1), (None, 1, 5), (0, 2, 1), (0, 4, 3), (1, 2, 7), (1, 4, 1)]


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("shape", [(8, 12), (16,)])
def test_what_one_layout_wrote_every_other_reads(written: tuple[int | None, int, int], shape: tuple[int, ...]) -> None:
    full = torch.randn(shape)
    sources = {piece: elements(full, piece).clone() for piece in cut(shape, *_for(shape, written))}
    for read in LAYOUTS:
        for target in cut(shape, *_for(shape, read)):
            tensor = torch.full((len(target),), torch.nan)
            fill(target, tensor, {each: held.clone for each, held in sources.items() if overlap(each, target)})
            assert torch.equal(tensor, elements(full, target)), (read, target.key)


def _for(shape: tuple[int, ...], layout: tuple[int | None, int, int]) -> tuple[int | None, int, int]:
    dim, num_parts, num_shares = layout
    return (0 if dim is not None and len(shape) == 1 else dim), num_parts, num_shares


def test_an_element_that_nobody_wrote_is_missing_also_where_another_was_written_twice() -> None:
    target = StateSlice.whole("weight", "a.weight", (2, 4))
    sources = [StateSlice("weight", "a.weight", target.box, 0, 5), StateSlice("weight", "a.weight", target.box, 4, 7)]

    with pytest.raises(ValueError, match=r"2 of 8 elements of weight/a.weight\[0:2,0:4\] are missing or there twice"):
        fill(target, torch.empty(8), {each: torch.ones(len(each)).clone for each in sources})


@pytest.mark.parametrize(
    "key", ["weight/model.norm.weight[0:16]", "exp_avg/a.weight[8:16,0:4]", "exp_avg_sq/a.weight[8:16,0:4].flat[3:32]"]
)
def test_a_slice_is_read_from_its_name(key: str) -> None:
    assert StateSlice.parse(key).key == key


@pytest.mark.parametrize(
    "key",
    [
        "a.weight[0:16]",
        "weight/a.weight",
        "weight/a.weight[0:16",
        "weight/a/b[0:16]",
        "weight/a.weight[-1:16]",
        "weight/a.weight[16:0]",
        "weight/a.weight[4:4]",
        "weight/a.weight[0:4].flat[2:5]",
        "weight/a.weight[0:4].flat[2:2]",
        "weight/a.weight[0:4,0:4,0:4]",
        "weight/a.weight[0:" + "9" * 30 + "]",
        "momentum/a.weight[0:4]",
    ],
)
def test_another_name_is_no_slice(key: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(key[:200]))):
        StateSlice.parse(key)
