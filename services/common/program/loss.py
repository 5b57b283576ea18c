"""Next-token cross-entropy, with the language-model head applied to a few hundred tokens at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(hidden_BSD: Tensor, lm_head_VD: Tensor, targets_BS: Tensor, chunk_tokens: int) -> Tensor:
    """Mean cross-entropy in nats over all B * S targets.

    The float32 logits [B * S, V] are the largest tensor of a small model; chunks that stay in the processor's
    cache make the same sum faster. One chunk for everything is bit-equal to transformers' loss.
    """
    hidden_TD, targets_T = hidden_BSD.flatten(0, 1), targets_BS.flatten()
    total = torch.zeros((), dtype=torch.float32, device=hidden_BSD.device)
    for chunk_TD, chunk_T in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
        logits_TV = F.linear(chunk_TD, lm_head_VD).float()
        total = total + F.cross_entropy(logits_TV, chunk_T, reduction="sum")
    return total / targets_T.numel()
