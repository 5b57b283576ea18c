"""Makes models with initial weights, without the program around them."""

from __future__ import annotations

import math

from services.common.program.initial_weights import draw_weights
from services.common.program.state import StateSlice
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Model


def initialize(model: Transformer, config: Model, seed: int) -> None:
    """Give a model, or a rank's part of it, the weights with which a program of this seed begins."""
    shardings, shapes, held = model.shardings(), {}, {}
    for name, parameter in model.named_parameters():
        shapes[name] = shardings[name].full_shape(parameter.shape)
        box = shardings[name].box(parameter.shape)
        num_elements = math.prod(end - first for first, end in box)
        parameter.data.zero_()  # rows of padding belong to no slice
        if num_elements:
            held[StateSlice("weight", name, box, 0, num_elements)] = parameter.data.view(-1)[:num_elements]
    draw_weights(held, shapes, config, seed)
