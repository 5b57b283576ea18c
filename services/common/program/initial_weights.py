"""Draws the initial weights of a model. Any part of a weight can be drawn alone, and has the bits that it has in the
whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from services.common.program.state import StateSlice, fill
from services.common.recipe.schema import Model

VOCABULARY_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
TILE = 256
"""Rows and columns of a tile, which is drawn as a whole. Making its stream takes 3 % of the time of drawing a tile."""


def draw_weights(
    held: Mapping[StateSlice, Tensor], shapes: Mapping[str, Sequence[int]], model: Model, seed: int
) -> None:
    """Fill the slices of weights in `held` with their initial values, and leave the moments as they are.

    Norms begin at 1. Matrices have a normal distribution, and each tile of TILE x TILE elements a random stream of its
    own, keyed by the seed, the parameter's name and the tile's number. So a weight depends neither on the order of
    creation, nor on other weights, nor on the ranks that share it. Projections into the residual stream are scaled by
    1 / sqrt(2 * layers), so that its variance does not grow with depth (GPT-2). Rows of padding are 0, and stay so.

    A rank draws the tiles that its slices touch: at 90 million elements a second, its share of the model and not the
    whole. `shapes` are those of the full parameters, by name.
    """
    for piece, tensor in held.items():
        if piece.kind != "weight":
            continue
        if len(piece.box) == 1:
            tensor.fill_(1.0)
            continue
        deviation = model.initializer_range
        if piece.name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= math.sqrt(2 * model.num_hidden_layers)
        key = int.from_bytes(hashlib.sha256(f"{seed}/{piece.name}".encode()).digest()[:16], "little")
        height, width = shapes[piece.name]
        num_drawn = model.vocab_size if piece.name in VOCABULARY_WEIGHTS else height
        tiles = {
            tile: partial(_draw_tile, key, number, tile, deviation, num_drawn)
            for number, tile in _find_tiles(piece, height, width)
        }
        fill(piece, tensor, tiles)


def _find_tiles(piece: StateSlice, height: int, width: int) -> Iterator[tuple[int, StateSlice]]:
    """Yield the tiles of a matrix that a slice may touch, with their numbers: row by row from the matrix's first."""
    (top, _), (left, right) = piece.box
    first_row, last_row = top + piece.start // (right - left), top + (piece.stop - 1) // (right - left)
    for row in range(first_row // TILE, last_row // TILE + 1):
        for column in range(left // TILE, (right - 1) // TILE + 1):
            rows = (row * TILE, min(height, (row + 1) * TILE))
            columns = (column * TILE, min(width, (column + 1) * TILE))
            tile = StateSlice("weight", piece.name, (rows, columns), 0, math.prod(b - a for a, b in (rows, columns)))
            yield row * -(-width // TILE) + column, tile


def _draw_tile(key: int, number: int, tile: StateSlice, deviation: float, num_drawn: int) -> Tensor:
    # Philox is a function of its key and a counter of 256 bits. The tile's number is in the upper half of the counter,
    # so no two streams meet. torch.Generator draws twice as fast, but a CPU's takes seeds of 32 bits: of the 6 million
    # tiles of Llama 3.1 405B some would be equal.
    stream = Generator(Philox(key=key, counter=[0, 0, number, 0]))
    drawn = torch.from_numpy(stream.standard_normal(len(tile), dtype=np.float32)).mul_(deviation)
    drawn.view(tile.shape)[max(0, num_drawn - tile.box[0][0]) :] = 0.0
    return drawn
