"""Causal attention by torch's `scaled_dot_product_attention`. A backend may use a faster kernel of its device.

Shape suffixes: B sequences, S positions, H query heads, K key-value heads, N head dimension.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    """Return attention [B, H, S, N] of each token to itself and earlier tokens, or to those that the mask allows."""
    return F.scaled_dot_product_attention(
        q_BHSN,
        k_BKSN,
        v_BKSN,
        attn_mask=mask_B1SS,
        is_causal=mask_B1SS is None,
        scale=q_BHSN.shape[-1] ** -0.5,
        enable_gqa=k_BKSN.shape[1] < q_BHSN.shape[1],
    )
