"""The stand-in's attention: `scaled_dot_product_attention` is one operation of the device, as it is on TorchNeuron.

TorchNeuron takes the operation that torch leaves to devices from other packages, with and without a mask. A graph has
its decomposition into matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.common.testing.torch_neuron.device import device_module, on_cpu, on_device

NAME = "_scaled_dot_product_fused_attention_overrideable"
COUNTED = f"aten::{NAME}"
"""Name by which the device counts the operation."""
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register(library: torch.library.Library) -> None:
    """Add the kernels to a library of aten's implementations."""
    library.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    library.impl(NAME, _run_forward, "PrivateUse1")
    library.impl(f"{NAME}_backward", _run_backward, "PrivateUse1")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    operation = torch.ops.aten.scaled_dot_product_attention.default
    if type(query) is not Tensor:  # a stand-in for one, with which torch traces a graph
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return operation.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed, forbidden = query.new_zeros(()), query.new_full((), -torch.inf)
        attn_mask = torch.where(attn_mask, allowed, forbidden)
    fused = getattr(torch.ops.aten, NAME).default
    return fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


def _run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    has_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    device_module().operations[COUNTED] += 1
    raw = on_cpu(query)
    keys, values = _repeat(on_cpu(key), raw), _repeat(on_cpu(value), raw)
    mask = None if bias is None else on_cpu(bias)
    result, log_sums = _FORWARD(raw, keys, values, dropout, is_causal, attn_mask=mask, scale=scale)
    length, nothing = query.shape[-2], None
    return (on_device(result), on_device(log_sums), *[nothing] * 2, length, length, *[nothing] * 3)


def _run_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    wanted: Any,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    result, log_sums, _, _, _, _, dropout, is_causal, *_ = rest
    raw = on_cpu(query)
    keys, values = _repeat(on_cpu(key), raw), _repeat(on_cpu(value), raw)
    mask = None if bias is None else on_cpu(bias)
    inputs = (on_cpu(gradient), raw, keys, values, on_cpu(result), on_cpu(log_sums), dropout, is_causal)
    of_query, of_keys, of_values = _BACKWARD(*inputs, attn_mask=mask, **options)
    of_key, of_value = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in (of_keys, of_values))
    return (*map(on_device, (of_query, of_key, of_value)), None)


def _repeat(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)
