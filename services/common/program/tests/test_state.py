"""The state: slices that every other sharding can read, their owners, and snapshots of a step."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.sharded_state import ShardedState
from services.common.program.sharding import Sharding
from services.common.program.state import StateSlice, fill, overlap
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import make_recipe


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
        "weight/a/b[0:16]",
        "weight/a.weight[4:4]",
        "weight/a.weight[0:4].flat[2:5]",
        "weight/a.weight[0:4,0:4,0:4]",
        "momentum/a.weight[0:4]",
    ],
)
def test_another_name_is_no_slice(key: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(key[:200]))):
        StateSlice.parse(key)


def state_of(recipe: Recipe, mesh: Mesh) -> ShardedState:
    group = ProcessGroup.fake(mesh.world_size, mesh.rank)
    try:
        return Program(recipe, TorchNative(mesh, 1, "fast"), draws_weights=False).state
    finally:
        group.leave()


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(0, data_parallel_size=1),
        Mesh(0, data_parallel_size=4),
        Mesh(0, data_parallel_size=2, tensor_parallel_size=2),
        Mesh(0, data_parallel_size=2, tensor_parallel_size=4, key_value_copies=2),
        Mesh(0, data_parallel_size=1, tensor_parallel_size=4, key_value_copies=2, are_copies_apart=True),
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_owners_that_one_worker_finds_are_what_each_worker_writes(
    tmp_path: Path, mesh: Mesh, zero_stage: int
) -> None:
    sizes = {"model__num_attention_heads": "4", "model__num_key_value_heads": "2", "batch__global_batch_size": "16"}
    recipe = make_recipe(tmp_path, **sizes, parallel__zero_stage=str(zero_stage), train__reduction="fast")
    meshes = [replace(mesh, rank=rank) for rank in range(mesh.world_size)]
    states = [state_of(recipe, each) for each in meshes]

    written = [
        (piece.name, *piece.row, rank) for rank, state in enumerate(states) for piece in state.start_snapshot()()
    ]
    for state in states[:: max(1, mesh.world_size - 1)]:
        found = [(name, *row) for name, rows in state.find_owners().items() for row in rows.tolist()]
        assert sorted(3 * found) == sorted(written)  # weights and both moments


def test_a_snapshot_keeps_its_step_while_the_next_changes_the_state_and_the_following_takes_its_memory(
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path, compile__enabled="false")
    program = Program(recipe, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact"))
    program.train_step(0, micro_batches_of(recipe, 0))
    expected = {piece: tensor.clone() for piece, tensor in program.state.read().items()}

    snapshot = program.state.start_snapshot()
    program.train_step(1, micro_batches_of(recipe, 1))
    found = snapshot()

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[piece], tensor) for piece, tensor in expected.items())
    following = program.state.start_snapshot()()
    assert all(tensor.data_ptr() == found[piece].data_ptr() for piece, tensor in following.items())
    assert not all(torch.equal(following[piece], tensor) for piece, tensor in expected.items())
