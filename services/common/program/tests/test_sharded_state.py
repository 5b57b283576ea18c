"""Every worker knows from the mesh alone which worker owns which slice of the state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.process_group import ProcessGroup
from services.common.program.sharded_state import ShardedState
from services.common.program.step import Program
from services.common.recipe.schema import Recipe
from services.common.testing.recipes import make_recipe


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
