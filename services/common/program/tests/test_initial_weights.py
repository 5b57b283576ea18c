"""Each rank draws only its own part of the initial weights, with the bits that this part has in the whole model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from services.common.program.initial_weights import TILE, draw_weights
from services.common.program.state import StateSlice, fill
from services.common.recipe.schema import Model
from services.common.testing.recipes import make_recipe

SHAPE = (3 * TILE + 8, 2 * TILE + 40)
NAME, OUTPUT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
SHAPES = {NAME: SHAPE, OUTPUT: SHAPE, NORM: (SHAPE[0],)}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_recipe(tmp_path).model


def draw(model: Model, *pieces: StateSlice, seed: int = 3) -> list[torch.Tensor]:
    held = {piece: torch.full((len(piece),), math.nan) for piece in pieces}
    draw_weights(held, SHAPES, model, seed)
    return list(held.values())


def whole_of(name: str) -> StateSlice:
    return StateSlice.whole("weight", name, SHAPES[name])


@pytest.mark.parametrize(
    ("box", "start", "stop"),
    [
        (((0, SHAPE[0]), (SHAPE[1] // 2, SHAPE[1])), 0, SHAPE[0] * (SHAPE[1] - SHAPE[1] // 2)),  # half of the columns
        (((TILE - 1, TILE + 1), (0, SHAPE[1])), 0, 2 * SHAPE[1]),  # rows on both sides of a tile's end
        (((0, SHAPE[0]), (0, SHAPE[1])), SHAPE[1] + 7, 300 * SHAPE[1] + 5),  # a run, as ZeRO-1 has it
        (((SHAPE[0] - 1, SHAPE[0]), (SHAPE[1] - 1, SHAPE[1])), 0, 1),
    ],
)
def test_a_part_has_the_bits_of_the_whole(
    model: Model, box: tuple[tuple[int, int], ...], start: int, stop: int
) -> None:
    part, whole = StateSlice("weight", NAME, box, start, stop), whole_of(NAME)
    [drawn], [full] = draw(model, part), draw(model, whole)

    expected = torch.empty(len(part))
    fill(part, expected, {whole: lambda: full})
    assert torch.equal(drawn, expected)


def test_weights_have_the_recipes_deviation_and_differ_by_name_seed_and_tile(model: Model) -> None:
    matrix, output, norm = draw(model, whole_of(NAME), whole_of(OUTPUT), whole_of(NORM))
    [other] = draw(model, whole_of(NAME), seed=4)
    scale = math.sqrt(2 * model.num_hidden_layers)

    assert norm.eq(1).all()
    assert matrix.mean().item() == pytest.approx(0, abs=4 * model.initializer_range / math.sqrt(len(matrix)))
    assert matrix.std().item() == pytest.approx(model.initializer_range, rel=0.01)
    assert output.std().item() == pytest.approx(model.initializer_range / scale, rel=0.01)
    assert len(matrix.unique()) > 0.99 * len(matrix)  # no tile is another's copy
    for unlike in (output * scale, other):
        assert torch.corrcoef(torch.stack([matrix, unlike]))[0, 1].abs() < 0.01
