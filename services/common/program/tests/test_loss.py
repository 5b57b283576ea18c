"""The loss: its gradient has the z-loss, and its value has not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.program.backends.backend import Collectives
from services.common.program.loss import next_token_loss

Z_LOSS = 0.1
CHUNK_TOKENS = 5  # the last chunk of 24 tokens is smaller


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [2, 12, 16], a head [40, 16] and targets [2, 12]; log(Z) is between 5 and 18."""
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = torch.randn(2, 12, 16, generator=generator, requires_grad=True)
    lm_head_VD = torch.randn(40, 16, generator=generator, requires_grad=True)
    return hidden_BSD, lm_head_VD, torch.randint(40, (2, 12), generator=generator)


def test_z_loss_changes_the_gradient_by_that_of_the_penalty_and_not_the_reported_loss() -> None:
    hidden_BSD, lm_head_VD, targets_BS = _leaves()
    without = next_token_loss(hidden_BSD, lm_head_VD, targets_BS, CHUNK_TOKENS, Collectives())
    loss = next_token_loss(hidden_BSD, lm_head_VD, targets_BS, CHUNK_TOKENS, Collectives(), z_loss=Z_LOSS)
    logits_TV = (hidden_BSD.double() @ lm_head_VD.double().t()).flatten(0, 1)
    formula = F.cross_entropy(logits_TV, targets_BS.flatten()) + Z_LOSS * logits_TV.logsumexp(-1).square().mean()

    assert torch.equal(loss, without)
    found = torch.autograd.grad(loss, (hidden_BSD, lm_head_VD))
    expected = torch.autograd.grad(formula, (hidden_BSD, lm_head_VD))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_the_heads_gradients_of_many_chunks_are_summed_in_float32(is_compiled: bool) -> None:
    """The error of 16 chunks is 1.3 times that of one chunk. It was 2.4 times while they were summed in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = torch.randn(1, 512, 32, generator=generator).bfloat16().requires_grad_()
    lm_head_VD = torch.randn(200, 32, generator=generator).mul(0.1).bfloat16().requires_grad_()
    targets_BS = torch.randint(200, (1, 512), generator=generator)
    precise_VD = lm_head_VD.detach().double().requires_grad_()
    precise = F.cross_entropy((hidden_BSD.detach().double() @ precise_VD.t()).flatten(0, 1), targets_BS.flatten())
    [expected] = torch.autograd.grad(precise, precise_VD)
    compute = torch.compile(next_token_loss, backend="aot_eager") if is_compiled else next_token_loss

    def error(chunk_tokens: int) -> float:
        loss = compute(hidden_BSD, lm_head_VD, targets_BS, chunk_tokens, Collectives())
        [found] = torch.autograd.grad(loss, lm_head_VD)
        return float((found.double() - expected).norm())

    assert error(32) < 1.4 * error(512)
