"""AdamW on flat tensors: PyTorch's AdamW after PyTorch's clip, and nothing at all after a poisoned gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from services.common.program.optimizer import learning_rate, step_scalars, update_in_place
from services.common.recipe import Optimizer

SETTINGS = Optimizer(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4, decay_steps=20, max_grad_norm=0.5)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_updates_match_torch_adamw_with_clipping_and_decay_on_matrices_only() -> None:
    matrix, vector = torch.nn.Parameter(_random(6, 5)), torch.nn.Parameter(_random(7))
    weights_P = torch.cat([matrix.detach().flatten(), vector.detach()])
    exp_avg_P, exp_avg_sq_P = torch.zeros(37), torch.zeros(37)
    groups = [{"params": [matrix], "weight_decay": SETTINGS.weight_decay}, {"params": [vector], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.epsilon)

    for step in range(25):
        gradient_P = _random(37) * (step + 1)
        matrix.grad, vector.grad = gradient_P[:30].view(6, 5).clone(), gradient_P[30:].clone()
        torch.nn.utils.clip_grad_norm_([matrix, vector], SETTINGS.max_grad_norm)
        for group in reference.param_groups:
            group["lr"] = learning_rate(SETTINGS, step)
        reference.step()
        update_in_place(weights_P, exp_avg_P, exp_avg_sq_P, gradient_P, step_scalars(SETTINGS, step), SETTINGS, 30)

    expected_P = torch.cat([matrix.detach().flatten(), vector.detach()])
    torch.testing.assert_close(weights_P, expected_P, rtol=1e-5, atol=1e-6)


def test_bias_corrections_count_the_updates_that_were_applied() -> None:
    """As torch's AdamW does when its step is not called, while the learning rate goes on with the step."""
    parameter = torch.nn.Parameter(_random(6, 5))
    weights_P = parameter.detach().flatten().clone()
    exp_avg_P, exp_avg_sq_P = torch.zeros(30), torch.zeros(30)
    reference = torch.optim.AdamW(
        [parameter], betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.epsilon, weight_decay=SETTINGS.weight_decay
    )
    skipped_steps = 0
    for step in range(12):
        gradient_P = _random(30 + step)[:30]
        if step in (0, 1, 5):
            gradient_P[7] = math.nan
        scalars_3 = step_scalars(SETTINGS, step, skipped_steps)
        _, is_applied = update_in_place(weights_P, exp_avg_P, exp_avg_sq_P, gradient_P, scalars_3, SETTINGS, 30)
        skipped_steps += not is_applied
        if is_applied:
            parameter.grad = gradient_P.view(6, 5).clone()
            torch.nn.utils.clip_grad_norm_([parameter], SETTINGS.max_grad_norm)
            reference.param_groups[0]["lr"] = learning_rate(SETTINGS, step)
            reference.step()

    assert skipped_steps == 3
    torch.testing.assert_close(weights_P, parameter.detach().flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float) -> None:
    state = (_random(10), _random(11)[:10], _random(12)[:10].abs())
    before = [tensor.clone() for tensor in state]
    gradient_P = _random(13)[:10]
    gradient_P[3] = poison
    _, is_applied = update_in_place(*state, gradient_P, step_scalars(SETTINGS, 5), SETTINGS, 10)
    assert not is_applied
    assert all(torch.equal(now, then) for now, then in zip(state, before, strict=True))


def test_learning_rate_warms_up_then_decays_to_its_minimum_and_stays() -> None:
    rates = [learning_rate(SETTINGS, step) for step in range(30)]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[20:] == pytest.approx([1e-3] * 10)
