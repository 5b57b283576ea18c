"""A snapshot keeps the state of its step while later steps change the state."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.testing.recipes import make_recipe


def test_a_snapshot_keeps_its_step_and_the_next_one_takes_its_memory(tmp_path: Path) -> None:
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
    assert {piece: tensor.data_ptr() for piece, tensor in following.items()} == {
        piece: tensor.data_ptr() for piece, tensor in found.items()
    }
    assert not all(torch.equal(following[piece], tensor) for piece, tensor in expected.items())
