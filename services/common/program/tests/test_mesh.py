"""The mesh: groups, indices and shares of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.program.mesh import Mesh, make_mesh
from services.common.testing.recipes import make_recipe


def test_neighbours_hold_the_parts_of_one_model() -> None:
    meshes = [Mesh(rank, data_parallel_size=2, tensor_parallel_size=4) for rank in range(8)]

    assert [mesh.index("tensor") for mesh in meshes] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [mesh.index("data") for mesh in meshes] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert meshes[0].groups("tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert meshes[0].groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_copies_of_a_key_value_head_are_apart_where_cores_are_linked_so() -> None:
    """neuronx-distributed's `arrange_kv_groups` forms these groups for 32 cores and 4 copies of each of 8 heads."""
    meshes = [Mesh(rank, 2, 32, key_value_copies=4, are_copies_apart=True) for rank in range(64)]

    assert meshes[0].groups("key_value")[:9] == [[n, n + 8, n + 16, n + 24] for n in (*range(8), 32)]
    assert [mesh.key_value_shard for mesh in meshes[:32]] == [*range(8)] * 4
    for mesh in meshes:
        assert mesh.group("key_value")[mesh.index("key_value")] == mesh.rank
        assert mesh.query_shard // 4 == mesh.key_value_shard
    assert sorted(mesh.query_shard for mesh in meshes[:32]) == [*range(32)]


@pytest.mark.parametrize(
    ("device", "instance_type", "is_apart"),
    [("xla", None, True), ("xla", "trn1.32xlarge", True), ("xla", "trn2.48xlarge", False), ("cpu", None, False)],
)
def test_copies_are_apart_on_trn1(tmp_path: Path, device: str, instance_type: str | None, is_apart: bool) -> None:
    recipe = make_recipe(tmp_path, parallel__device=device, train__reduction="fast")
    cluster = recipe.cluster.model_copy(update={"trainer_instance_type": instance_type})
    assert make_mesh(recipe.model_copy(update={"cluster": cluster}), 0, 1).are_copies_apart == is_apart


def test_the_parts_of_one_model_take_the_same_share_and_together_all_of_them_take_everything() -> None:
    shares = [Mesh(rank, data_parallel_size=2, tensor_parallel_size=2).share(8) for rank in range(4)]

    assert shares == [range(4), range(4), range(4, 8), range(4, 8)]
    assert [Mesh(rank, 2, takes_turns=True).share(8) for rank in range(2)] == [range(0, 8, 2), range(1, 8, 2)]
    with pytest.raises(ValueError, match=r"\b9\b.*\b2\b"):
        Mesh(0, data_parallel_size=2).share(9)
