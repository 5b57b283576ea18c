"""Causal attention by torch's own function; a device with a better one has it in its backend.

Shape suffixes: B sequences, S positions, H query heads, K key-value heads, N head dimension.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attend(q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
    """Each token attends to itself and to those before it, or to those that the mask says. [B, H, S, N]"""
    return F.scaled_dot_product_attention(
        q_BHSN,
        k_BKSN,
        v_BKSN,
        attn_mask=mask_B1SS,
        is_causal=mask_B1SS is None,
        scale=q_BHSN.shape[-1] ** -0.5,
        enable_gqa=k_BKSN.shape[1] < q_BHSN.shape[1],
    )
