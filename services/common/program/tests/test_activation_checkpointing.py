"""Activation checkpointing keeps less for the backward pass, and changes no bit of the gradients."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import Tensor

from services.common.program.loss import next_token_loss
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Recipe
from services.common.recipe.training import ActivationCheckpointing
from services.common.testing.models import initialize
from services.common.testing.recipes import recipe_text

LENGTH = 32
GROUPED = Recipe.model_validate(tomllib.loads(recipe_text(model__num_hidden_layers=3))).model


def gradients(mode: ActivationCheckpointing, is_compiled: bool = False) -> tuple[list[Tensor], int]:
    """Return the gradient of every parameter, and the bytes that the layers kept for the backward pass.

    Compiled, the model is traced into a graph, whose operations then run one by one.
    """
    model = Transformer(GROUPED, LENGTH, activation_checkpointing=mode)
    initialize(model, GROUPED, seed=7)
    tokens_BS = torch.randint(GROUPED.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        hidden_BSD = run(tokens_BS[:, :-1])
    loss = next_token_loss(hidden_BSD, model.lm_head.weight, tokens_BS[:, 1:], 32, model.collectives)
    return list(torch.autograd.grad(loss, list(model.parameters()))), sum(kept.values())


@pytest.mark.parametrize(("mode", "is_compiled"), [("selective", False), ("full", False), ("selective", True)])
def test_the_gradients_have_the_same_bits(mode: ActivationCheckpointing, is_compiled: bool) -> None:
    for ours, expected in zip(gradients(mode, is_compiled)[0], gradients("none", is_compiled)[0], strict=True):
        assert torch.equal(ours, expected)


def test_full_keeps_less_than_a_third() -> None:
    assert gradients("full")[1] < gradients("none")[1] / 3
