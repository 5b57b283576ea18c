"""Weights that are rounded once an update give the bits of weights that autocast rounds at each use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import Mesh
from services.common.program.step import Program
from services.common.program.tests.work import micro_batches_of
from services.common.testing.recipes import make_recipe

STEPS = 4


@pytest.mark.parametrize("is_tied", ["false", "true"])
def test_weights_that_are_rounded_once_an_update_train_as_those_that_autocast_rounds_at_each_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: str
) -> None:
    recipe = make_recipe(
        tmp_path, compile__enabled="false", train__dtype="bfloat16", model__tie_word_embeddings=is_tied
    )

    def train() -> tuple[set[torch.dtype], list[float], dict[str, torch.Tensor]]:
        backend = TorchNative(Mesh(0, data_parallel_size=1), 1, "exact")
        program = Program(recipe, backend)
        results = [program.train_step(step, micro_batches_of(recipe, step)) for step in range(STEPS)]
        numbers = [number for each in results for number in backend.read(each._asdict()).values()]
        dtypes = {parameter.dtype for parameter in program.model.parameters()}
        return dtypes, numbers, {piece.key: tensor for piece, tensor in program.state.start_snapshot()().items()}

    dtypes, numbers, state = train()
    monkeypatch.setattr(Program, "_cast_buckets", lambda _: None)
    expected_dtypes, expected_numbers, expected_state = train()

    assert (dtypes, expected_dtypes) == ({torch.float32, torch.bfloat16}, {torch.float32})
    assert numbers == expected_numbers
    assert all(torch.equal(tensor, expected_state[key]) for key, tensor in state.items())
