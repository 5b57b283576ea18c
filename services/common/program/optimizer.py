"""AdamW on flat tensors (arXiv 1711.05101), a global gradient clip, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.common.recipe import Optimizer


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Rate of the update number `step` (from 0): linear warm-up, then cosine decay. A function of the step alone."""
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    progress = min(1.0, (step - optimizer.warmup_steps) / (optimizer.decay_steps - optimizer.warmup_steps))
    span = optimizer.learning_rate - optimizer.min_learning_rate
    return optimizer.min_learning_rate + span * 0.5 * (1.0 + math.cos(math.pi * progress))


def step_scalars(optimizer: Optimizer, step: int, skipped_steps: int = 0) -> Tensor:
    """[3] float32: the learning rate and AdamW's two bias corrections. A tensor, so that no graph bakes a step in.

    The moments are means over the updates that were applied, so the corrections count those: `skipped_steps` of the
    steps before this one were not.
    """
    updates = step + 1 - skipped_steps
    corrections = (1.0 - optimizer.beta1**updates, 1.0 - optimizer.beta2**updates)
    return torch.tensor([learning_rate(optimizer, step), *corrections], dtype=torch.float32)


def update_in_place(
    weights_P: Tensor,
    exp_avg_P: Tensor,
    exp_avg_sq_P: Tensor,
    gradient_P: Tensor,
    scalars_3: Tensor,
    optimizer: Optimizer,
    num_decayed: int,
) -> tuple[Tensor, Tensor]:
    """One AdamW update of the weights and both moments; returns (gradient norm before clipping, was it applied).

    When the norm is not finite nothing changes: a poisoned gradient must not reach the weights or the moments.
    """
    rate, correction1, correction2 = scalars_3.unbind()
    norm = gradient_P.square().sum().sqrt()
    is_finite = torch.isfinite(norm)
    clipped_P = gradient_P * torch.clamp(optimizer.max_grad_norm / (norm + 1e-6), max=1.0)
    new_exp_avg_P = optimizer.beta1 * exp_avg_P + (1.0 - optimizer.beta1) * clipped_P
    new_exp_avg_sq_P = optimizer.beta2 * exp_avg_sq_P + (1.0 - optimizer.beta2) * clipped_P.square()
    direction_P = (new_exp_avg_P / correction1) / ((new_exp_avg_sq_P / correction2).sqrt() + optimizer.epsilon)
    is_decayed_P = torch.arange(weights_P.numel(), device=weights_P.device) < num_decayed
    decay_P = is_decayed_P.float() * (rate * optimizer.weight_decay)
    weights_P.copy_(torch.where(is_finite, weights_P - decay_P * weights_P - rate * direction_P, weights_P))
    exp_avg_P.copy_(torch.where(is_finite, new_exp_avg_P, exp_avg_P))
    exp_avg_sq_P.copy_(torch.where(is_finite, new_exp_avg_sq_P, exp_avg_sq_P))
    return norm, is_finite
