"""The loss: its gradient has the z-loss, and its value has not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.program.layers import OneWorker
from services.common.program.loss import next_token_loss, next_token_losses

Z_LOSS = 0.1
CHUNK_TOKENS = 5  # the last chunk of 24 tokens is smaller


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [2, 12, 16], a head [40, 16] and targets [2, 12]; log(Z) is between 5 and 18."""
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = torch.randn(2, 12, 16, generator=generator, requires_grad=True)
    lm_head_VD = torch.randn(40, 16, generator=generator, requires_grad=True)
    return hidden_BSD, lm_head_VD, torch.randint(40, (2, 12), generator=generator)


def test_z_loss_changes_the_gradient_by_that_of_the_penalty() -> None:
    hidden_BSD, lm_head_VD, targets_BS = _leaves()
    loss = next_token_loss(hidden_BSD, lm_head_VD, targets_BS, CHUNK_TOKENS, OneWorker(), Z_LOSS)
    logits_TV = (hidden_BSD.double() @ lm_head_VD.double().t()).flatten(0, 1)
    formula = F.cross_entropy(logits_TV, targets_BS.flatten()) + Z_LOSS * logits_TV.logsumexp(-1).square().mean()

    found = torch.autograd.grad(loss, (hidden_BSD, lm_head_VD))
    expected = torch.autograd.grad(formula, (hidden_BSD, lm_head_VD))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_reported_loss_is_cross_entropy_alone() -> None:
    leaves = _leaves()
    without = next_token_loss(*leaves, CHUNK_TOKENS, OneWorker())

    assert torch.equal(next_token_loss(*leaves, CHUNK_TOKENS, OneWorker(), Z_LOSS), without)


def test_an_evaluation_has_the_loss_of_each_target() -> None:
    hidden_BSD, lm_head_VD, targets_BS = _leaves()
    with torch.no_grad():
        found_BS = next_token_losses(hidden_BSD, lm_head_VD, targets_BS, CHUNK_TOKENS, OneWorker())
        expected_T = F.cross_entropy(
            (hidden_BSD @ lm_head_VD.t()).flatten(0, 1), targets_BS.flatten(), reduction="none"
        )
        mean = next_token_loss(hidden_BSD, lm_head_VD, targets_BS, CHUNK_TOKENS, OneWorker())

    torch.testing.assert_close(found_BS, expected_T.view(targets_BS.shape), rtol=1e-6, atol=1e-6)
    assert found_BS.mean().item() == pytest.approx(mean.item(), rel=1e-6)
