"""Activation checkpointing: the backward pass recomputes activations that the forward pass did not keep.

The method is that of arXiv 1604.06174; `selective` follows arXiv 2205.05198, section 5, with the operations in KEPT.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from services.common.recipe.schema import ActivationCheckpointing

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,  # that of a device from another package
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}
"""Slow operations, whose results `selective` keeps. Norms, rotations and activation functions are recomputed."""


def run_checkpointed(layer: nn.Module, mode: ActivationCheckpointing, *arguments: Tensor | None) -> Tensor:
    """Return `layer(*arguments)`, keeping for the backward pass what `train.activation_checkpointing` says."""
    if mode == "none":
        kept: Tensor = layer(*arguments)
        return kept
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":  # written out here, because Dynamo refuses a function that a variable holds
        options["context_fn"] = partial(create_selective_checkpoint_contexts, choose_policy)
    recomputed: Tensor = checkpoint(layer, *arguments, **options)
    return recomputed


def choose_policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Return whether `selective` keeps the result of an operation, in the form that torch asks for."""
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
