"""AdamW on buckets does what torch's AdamW does after torch's clip, and nothing after a gradient that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.common.program.backends.torch_native import TorchNative
from services.common.program.buckets import Bucket, choose_num_blocks, make_buckets
from services.common.program.mesh import Mesh
from services.common.program.optimizer import AdamW, learning_rate, step_scalars
from services.common.program.sharding import Sharding
from services.common.recipe.schema import Optimizer

SETTINGS = Optimizer(learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=4, decay_steps=20, max_grad_norm=0.5)
MATRIX, VECTOR = "layers.0.weight", "norm.weight"


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _model() -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(5, 6, bias=False)])
    model.norm = nn.RMSNorm(7)
    with torch.no_grad():
        model.get_parameter(MATRIX).copy_(_random(6, 5))
        model.get_parameter(VECTOR).copy_(_random(7))
    return model


def _buckets(model: nn.Module, num_blocks: int) -> list[Bucket]:
    return make_buckets(dict(model.named_parameters()), {MATRIX: Sharding(), VECTOR: Sharding()}, num_blocks)


def _optimizer(buckets: list[Bucket]) -> AdamW:
    return AdamW(buckets, SETTINGS, TorchNative(Mesh(0, data_parallel_size=1), 1, "exact"), False, False)


def _flatten(buckets: list[Bucket], gradients: dict[str, Tensor]) -> list[Tensor]:
    return [bucket.flatten(gradients[name] for name in bucket.parameters) for bucket in buckets]


@pytest.mark.parametrize(
    ("num_blocks", "poisoned"), [(1, {}), (4, {}), (2, {0: math.nan, 1: math.inf, 5: -math.inf, 6: math.nan})]
)
def test_updates_match_torch_adamw_with_clipping_and_decay_on_matrices_only(
    num_blocks: int, poisoned: dict[int, float]
) -> None:
    """A gradient that is not finite changes nothing: bias corrections count the updates that were applied, as where
    torch's `step` is not called. The learning rate follows the step.
    """
    ours, reference_model, skipped_steps = _model(), _model(), 0
    buckets = _buckets(ours, num_blocks)
    optimizer = _optimizer(buckets)
    matrix, vector = (reference_model.get_parameter(name) for name in (MATRIX, VECTOR))
    groups = [{"params": [matrix], "weight_decay": SETTINGS.weight_decay}, {"params": [vector], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.epsilon)

    for step in range(25):
        matrix.grad, vector.grad = _random(6, 5) * (step + 1), _random(7) * (step + 1)
        gradients = {MATRIX: 8 * matrix.grad, VECTOR: 8 * vector.grad}
        if step in poisoned:
            gradients[MATRIX][1, 2] = poisoned[step]
        scalars_11 = step_scalars(SETTINGS, step, skipped_steps)
        our_norm_1, is_applied = optimizer.step(_flatten(buckets, gradients), 8, scalars_11)
        assert bool(is_applied) == (step not in poisoned)
        if step in poisoned:
            skipped_steps += 1
            continue
        norm = torch.nn.utils.clip_grad_norm_([matrix, vector], SETTINGS.max_grad_norm)
        for group in reference.param_groups:
            group["lr"] = learning_rate(SETTINGS, step)
        reference.step()
        torch.testing.assert_close(our_norm_1.squeeze(0), norm)

    for name in (MATRIX, VECTOR):
        expected = reference_model.get_parameter(name)
        torch.testing.assert_close(ours.get_parameter(name), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_an_update_has_the_same_bits_for_any_number_of_threads(num_blocks: int) -> None:
    """Threads share the blocks, and the ends of the blocks fill no vector."""

    def update(num_threads: int) -> list[Tensor]:
        torch.set_num_threads(num_threads)
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(613, 401, bias=False)])
        model.norm = nn.RMSNorm(7)
        with torch.no_grad():
            model.get_parameter(MATRIX).copy_(_random(401, 613))
        buckets = _buckets(model, num_blocks)
        optimizer, norms = _optimizer(buckets), list[Tensor]()
        torch.set_num_threads(num_threads)
        for step in range(3):
            gradients = {MATRIX: _random(401, 613) * 10.0**step, VECTOR: _random(7)}
            norm_1, _ = optimizer.step(_flatten(buckets, gradients), 1, step_scalars(SETTINGS, step))
            norms.append(norm_1)
        return [*norms, *(tensor for held in optimizer.state().values() for tensor in held)]

    before = torch.get_num_threads()
    try:
        one, two, three = (update(num_threads) for num_threads in (1, 2, 3))
    finally:
        torch.set_num_threads(before)
    for first, second, third in zip(one, two, three, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_the_blocks_follow_from_the_batch_alone_wherever_they_can() -> None:
    assert {choose_num_blocks(16, workers) for workers in (1, 2, 4, 8, 16)} == {16}
    assert {choose_num_blocks(12, workers) for workers in (1, 2, 3, 4, 6, 12)} == {12}
    assert {choose_num_blocks(1024, workers) for workers in (1, 16, 64)} == {64}
    assert [choose_num_blocks(1024, 128), choose_num_blocks(120, 5)] == [128, 5]


def _rates(**settings: Any) -> list[float]:
    return [learning_rate(Optimizer(learning_rate=1.0, warmup_steps=4, **settings), step) for step in range(14)]


def test_each_schedule_warms_up_and_takes_its_own_course() -> None:
    warm = [0.25, 0.5, 0.75, 1.0]
    assert _rates(schedule="constant") == [*warm, *[1.0] * 10]
    assert _rates(schedule="linear", decay_steps=12) == [*warm, *(1 - step / 8 for step in range(8)), 0, 0]
    cosine = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert _rates(schedule="cosine", decay_steps=12) == pytest.approx([*warm, *cosine, 0, 0])
    cool = [1 - math.sqrt(step / 4) for step in range(4)]
    assert _rates(schedule="wsd", decay_steps=12, cooldown_steps=4) == [*warm, *[1.0] * 4, *cool, 0, 0]
    assert _rates(schedule="linear", decay_steps=12, min_learning_rate=0.5)[8] == pytest.approx(0.75)


def test_a_warm_up_that_begins_later_is_the_first_one_moved() -> None:
    first, later = (
        Optimizer(learning_rate=1.0, warmup_steps=4, warmup_begin_step=begin, decay_steps=begin + 9) for begin in (0, 7)
    )
    assert [learning_rate(later, 7 + step) for step in range(9)] == [learning_rate(first, step) for step in range(9)]
