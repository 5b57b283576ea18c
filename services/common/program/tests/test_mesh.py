"""Where workers stand among the others."""

from __future__ import annotations

import pytest

from services.common.program.mesh import AXES, Mesh


def test_neighbours_hold_the_parts_of_one_model() -> None:
    meshes = [Mesh(rank, data_parallel_size=2, tensor_parallel_size=4) for rank in range(8)]

    assert [mesh.index("tensor") for mesh in meshes] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [mesh.index("data") for mesh in meshes] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert meshes[0].groups("tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert meshes[0].groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 1), (1, 4), (2, 4), (3, 2)])
def test_along_each_axis_every_worker_finds_itself_at_its_index(data: int, tensor: int) -> None:
    for rank in range(data * tensor):
        mesh = Mesh(rank, data, tensor)
        for axis in AXES:
            assert mesh.group(axis)[mesh.index(axis)] == rank
            assert len(mesh.group(axis)) == mesh.size(axis)
            assert sorted(rank for group in mesh.groups(axis) for rank in group) == list(range(mesh.world_size))


def test_the_parts_of_one_model_take_the_same_share_and_together_all_of_them_take_everything() -> None:
    shares = [Mesh(rank, data_parallel_size=2, tensor_parallel_size=2).share(8) for rank in range(4)]

    assert shares == [range(4), range(4), range(4, 8), range(4, 8)]
    with pytest.raises(ValueError, match="9 items cannot be shared evenly by 2 models"):
        Mesh(0, data_parallel_size=2).share(9)


@pytest.mark.parametrize(("rank", "data", "tensor"), [(4, 2, 2), (-1, 2, 2), (0, 0, 2), (0, 2, 0)])
def test_a_rank_outside_of_the_mesh_is_refused(rank: int, data: int, tensor: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is none of {data} x {tensor} workers"):
        Mesh(rank, data, tensor)
