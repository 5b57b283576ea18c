"""Activation checkpointing: the backward pass computes again what the forward pass did not keep (arXiv 1604.06174)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from services.common.recipe import ActivationCheckpointing

# What takes long, and is kept under `selective`; norms, rotations and activation functions are computed again.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def run_checkpointed(layer: nn.Module, mode: ActivationCheckpointing, *arguments: Tensor | None) -> Tensor:
    """`layer(*arguments)`, which keeps for the backward pass what `train.activation_checkpointing` says."""
    if mode == "none":
        kept: Tensor = layer(*arguments)
        return kept
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":  # written here, where Dynamo sees what it is: it refuses a function that a variable holds
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose)
    recomputed: Tensor = checkpoint(layer, *arguments, **options)
    return recomputed


def _choose(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
