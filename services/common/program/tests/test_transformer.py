"""Llama and Qwen3 are those of transformers: same logits, same loss, same gradients, bit for bit in eager float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.program.backends.backend import Collectives
from services.common.program.loss import next_token_loss
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Model, RopeScaling
from services.common.testing.models import initialize

LENGTH = 96

LLAMA_2 = Model(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)
LLAMA_3 = LLAMA_2.model_copy(
    update={"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500_000.0}
)
LLAMA_3_1 = LLAMA_3.model_copy(
    update={
        # The original length is so small that this length takes all three branches of the scaling.
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        )
    }
)
TIED = LLAMA_2.model_copy(update={"tie_word_embeddings": True})
WIDE_HEADS = LLAMA_3.model_copy(update={"head_dim": 24})  # queries have three times the width of the hidden states
QWEN_3 = WIDE_HEADS.model_copy(update={"qk_norm": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6})
SHAPES = {
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "llama-3.1": LLAMA_3_1,
    "tied": TIED,
    "wide heads": WIDE_HEADS,
    "qwen-3": QWEN_3,
    "qwen-3, tied": QWEN_3.model_copy(update={"tie_word_embeddings": True}),
    "qwen-3, heads that are not grouped": QWEN_3.model_copy(update={"num_key_value_heads": 8}),
}


@pytest.fixture(params=SHAPES, scope="module")
def models(request: pytest.FixtureRequest) -> tuple[Transformer, Any]:
    # No image has transformers. Pants tests with an image's packages, and so skips these tests; `make test` runs them.
    transformers = pytest.importorskip("transformers")
    config, ours = SHAPES[request.param], _model(request.param)
    family = "qwen3" if config.qk_norm else "llama"
    fields = transformers.AutoConfig.for_model(family, **_transformers_fields(config))
    theirs = transformers.AutoModelForCausalLM.from_config(fields, dtype=torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=True)  # names and shapes are Hugging Face's
    return ours, theirs


def _model(shape: str) -> Transformer:
    model = Transformer(SHAPES[shape], LENGTH)
    initialize(model, SHAPES[shape], seed=7)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # a norm's, which begins at 1
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def _transformers_fields(config: Model) -> dict[str, Any]:
    fields = config.model_dump(exclude={"preset", "qk_norm", "rope_theta", "rope_scaling"})
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope = {"rope_type": "llama3", "rope_theta": config.rope_theta, **config.rope_scaling.model_dump()}
    return {**fields, "rope_parameters": rope, "max_position_embeddings": LENGTH, "use_cache": False}


def _tokens(columns: int) -> torch.Tensor:
    return torch.randint(0, 320, (2, columns), generator=torch.Generator().manual_seed(1))


def test_logits_are_bit_equal(models: tuple[Transformer, Any]) -> None:
    ours, theirs = models
    tokens_BS = _tokens(LENGTH)
    assert torch.equal(ours.logits(tokens_BS), theirs(tokens_BS).logits)


def test_loss_and_every_gradient_are_bit_equal(models: tuple[Transformer, Any]) -> None:
    ours, theirs = models
    tokens_BS = _tokens(LENGTH + 1)
    inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:].contiguous()

    our_loss = next_token_loss(ours(inputs_BS), ours.lm_head.weight, targets_BS, targets_BS.numel(), Collectives())
    their_loss = theirs(inputs_BS, labels=inputs_BS, shift_labels=targets_BS).loss
    our_gradients = torch.autograd.grad(our_loss, list(ours.parameters()))
    their_gradients = torch.autograd.grad(their_loss, list(theirs.parameters()))

    assert torch.equal(our_loss, their_loss)
    for (name, _), our, their in zip(ours.named_parameters(), our_gradients, their_gradients, strict=True):
        assert torch.equal(our, their), name


START = 30
"""Position at which the second of two documents in a row starts."""


def _positions() -> torch.Tensor:
    places = torch.arange(LENGTH, dtype=torch.int32)
    return torch.where(places < START, places, places - START).repeat(2, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_in_a_row_has_the_logits_that_it_has_alone(shape: str) -> None:
    model, tokens_BS = _model(shape), _tokens(LENGTH)
    together = model.logits(tokens_BS, _positions())

    for document in (slice(START), slice(START, LENGTH)):
        torch.testing.assert_close(together[:, document], model.logits(tokens_BS[:, document]), rtol=1e-5, atol=1e-6)
