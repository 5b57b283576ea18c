"""AdamW on buckets of parameters, a global gradient clip, and the learning-rate schedule.

Shape suffixes: K buckets, N blocks of a bucket, P elements of a bucket, S elements of this rank's shard of a bucket,
U elements of a unit that is updated at once, 1 and 11 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from services.common.program.backends.backend import Backend
from services.common.program.buckets import Bucket
from services.common.program.state import StateKind
from services.common.recipe.schema import Optimizer, Schedule


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of step number `step` (from 0): a linear warm-up, then `optimizer.schedule`."""
    warm = optimizer.warmup_begin_step + optimizer.warmup_steps
    if step < warm:
        return optimizer.learning_rate * (step - optimizer.warmup_begin_step + 1) / optimizer.warmup_steps
    if optimizer.decay_steps is None:
        return optimizer.learning_rate
    start = warm
    if optimizer.cooldown_steps is not None:
        start = optimizer.decay_steps - optimizer.cooldown_steps
        if step <= start:
            return optimizer.learning_rate  # and not the sum below, which may be rounded: `constant` has these bits
    progress = min(1.0, (step - start) / (optimizer.decay_steps - start))
    span = optimizer.learning_rate - optimizer.min_learning_rate
    return optimizer.min_learning_rate + span * _SHAPES[optimizer.schedule](progress)


_SHAPES: dict[Schedule, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of the fall that is still ahead at each share of its steps, from 1 at 0 to 0 at 1."""


def step_scalars(optimizer: Optimizer, step: int, skipped_steps: int = 0) -> Tensor:
    """Return the learning rate, AdamW's two bias corrections, the number of updates that they count, each beta and what
    is left to 1, epsilon, the weight decay, and the largest gradient norm: [11] float32.

    They are a tensor, so that no graph contains the step or the recipe's optimizer. The moments are means over the
    applied updates, so the bias corrections count those: `skipped_steps` steps before this one were not applied.
    """
    updates, beta1, beta2 = step + 1 - skipped_steps, optimizer.beta1, optimizer.beta2
    rates = (learning_rate(optimizer, step), 1.0 - beta1**updates, 1.0 - beta2**updates, updates)
    settings = (optimizer.epsilon, optimizer.weight_decay, optimizer.max_grad_norm)
    return torch.tensor([*rates, beta1, 1.0 - beta1, beta2, 1.0 - beta2, *settings], dtype=torch.float32)


class AdamW:
    """AdamW (arXiv 1711.05101) with a global gradient clip, over buckets of parameters. Both moments begin at 0.

    Sharded, each rank of the data axis updates its shard of every bucket and holds master weights and moments of that
    shard alone (ZeRO-1, arXiv 1910.02054). The bits are those of the update that is not sharded: a block's update does
    not depend on the rank that holds the block, and the gradient norm sums the blocks' sums of squares in one order.

    Master weights are float32. They are the memory of the model's own weights until a bucket is cast to a narrower
    type; from then on the model's weights are rounded from them (arXiv 1710.03740, section 3.1).
    """

    def __init__(
        self, buckets: Sequence[Bucket], settings: Optimizer, backend: Backend, is_compiled: bool, is_sharded: bool
    ) -> None:
        self._buckets, self._settings, self._backend = buckets, settings, backend
        self.is_sharded = is_sharded and backend.mesh.data_parallel_size > 1
        self._weights_S = [backend.place(self._make_master(bucket)) for bucket in buckets]
        self.exp_avg_S = [backend.place(torch.zeros_like(self._shard(bucket))) for bucket in buckets]
        self.exp_avg_sq_S = [backend.place(torch.zeros_like(self._shard(bucket))) for bucket in buckets]
        copies = [backend.mesh.size(bucket.sum_axis) if bucket.sum_axis else 1 for bucket in buckets]
        self._counted_K = backend.place(torch.tensor([1.0 / each for each in copies]))
        """Factor of a bucket's squares in the norm: 1 / c where c ranks hold copies, so that these count once."""
        self._gradient_squares_K: Tensor | None = None
        """Sums of squares of the last step's gradients, which the ranks of the tensor axis have still to add."""
        self._is_decayed_1 = [backend.place(torch.full((1,), float(bucket.is_decayed))) for bucket in buckets]
        self._is_fused = backend.has_fused_adamw(is_compiled)
        self._update_unit: Callable[..., None] = self._update
        if is_compiled and not self._is_fused:
            self._update_unit = backend.compile(self._update, is_dynamic=True)

    @torch.no_grad()
    def step(self, gradients_S: Sequence[Tensor], divisor: int, scalars_11: Tensor) -> tuple[Tensor, Tensor]:
        """Update the weights once, with `step_scalars` and this rank's shard of `divisor` times the gradient for each
        bucket, summed over the data axis. The gradients are overwritten where the update is applied.

        Returns the gradient norm before clipping, and whether the update was applied, both [1] on the device. Where the
        norm is not finite nothing changes: a gradient that is not finite must reach neither weights nor moments.
        """
        gradients_S = [
            self._backend.all_reduce(each_S, bucket.sum_axis) if bucket.sum_axis else each_S
            for bucket, each_S in zip(self._buckets, gradients_S, strict=True)
        ]
        squares_NK = torch.stack(
            [bucket.sums_of_squares(each_S) for bucket, each_S in zip(self._buckets, gradients_S, strict=True)], dim=1
        )
        if self.is_sharded:
            squares_NK = self._backend.all_gather(squares_NK, "data")
        self._gradient_squares_K = squares_NK.sum(0) * self._counted_K
        squares_1 = self._gradient_squares_K.sum(0, keepdim=True)
        norm_1 = self._backend.all_reduce(squares_1, "tensor").sqrt() / divisor
        is_finite_1 = torch.isfinite(norm_1)
        # A division would have other bits than torch's quotient of a Python number and a tensor.
        scale_1 = torch.clamp((norm_1 + 1e-6).reciprocal() * scalars_11[-1], max=1.0) / divisor
        for number, bucket in enumerate(self._buckets):
            tensors_S = (
                self._weights_S[number],
                self.exp_avg_S[number],
                self.exp_avg_sq_S[number],
                gradients_S[number],
            )
            units_U = [bucket.update_units(each_S) for each_S in tensors_S]
            if self._is_fused:
                self._update_fused(units_U, scale_1, is_finite_1, scalars_11, bucket.is_decayed)
                continue
            for unit_U in zip(*units_U, strict=True):
                self._update_unit(*unit_U, scale_1, is_finite_1, scalars_11, self._is_decayed_1[number])
        self.update_weights()
        return norm_1, is_finite_1

    @torch.no_grad()
    def measure_squares(self, scalars_11: Tensor) -> Tensor:
        """Return sums of squares for each bucket, [3, K]: of the last step's gradient times its divisor, of its update,
        and of the weights before the update. It changes nothing.

        `scalars_11` are those of the last step, which has to be applied. The update follows from the moments and the
        weights after it. Copies of a parameter count once. The sums have the same bits on all ranks, and for every
        number of ranks of the data axis: these exchange 2 numbers for each block of each bucket, and the ranks of the
        tensor axis 3 for each bucket.
        """
        assert self._gradient_squares_K is not None
        updates_N, weights_N = zip(*self._measure_shards(scalars_11), strict=True)
        squares_NK = torch.stack([*updates_N, *weights_N], dim=1)
        if self.is_sharded:
            squares_NK = self._backend.all_gather(squares_NK, "data")
        updates_K, weights_K = squares_NK.sum(0).chunk(2)
        counted_K = self._counted_K
        squares_3K = torch.stack([self._gradient_squares_K, updates_K * counted_K, weights_K * counted_K])
        return self._backend.all_reduce(squares_3K, "tensor")

    def _measure_shards(self, scalars_11: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums of squares of each block [N] of this rank's shard of each bucket: of the last update, and of
        the weights before it.
        """
        rate, correction1, correction2, *_, epsilon, weight_decay, _ = scalars_11.unbind()
        for number, bucket in enumerate(self._buckets):
            tensors_S = self._weights_S[number], self.exp_avg_S[number], self.exp_avg_sq_S[number]
            decay = rate * weight_decay if bucket.is_decayed else 0.0 * rate
            parts: list[tuple[Tensor, Tensor]] = []
            for weights_U, exp_avg_U, exp_avg_sq_U in zip(*map(bucket.update_units, tensors_S), strict=True):
                moved_U = rate * (exp_avg_U / correction1) / ((exp_avg_sq_U / correction2).sqrt() + epsilon)
                before_U = (weights_U + moved_U) / (1.0 - decay)
                update_U = moved_U + decay * before_U
                parts.append((bucket.sums_of_squares(update_U), bucket.sums_of_squares(before_U)))
            updates, weights = zip(*parts, strict=True)
            yield torch.cat(updates), torch.cat(weights)

    def state(self) -> dict[StateKind, list[Tensor]]:
        """Return this rank's shard [S] of each bucket by kind: the whole bucket where nothing is sharded."""
        return {"weight": self._weights_S, "exp_avg": self.exp_avg_S, "exp_avg_sq": self.exp_avg_sq_S}

    def update_weights(self) -> None:
        """Round the model's weights from the master weights. Ranks with shards all-gather them in the model's type,
        unless the weights stay sharded, too.
        """
        for bucket, weights_S in zip(self._buckets, self._weights_S, strict=True):
            is_gathered = self.is_sharded and not bucket.is_sharded
            bucket.write(self._backend.all_gather(weights_S.to(bucket.dtype), "data") if is_gathered else weights_S)

    def _make_master(self, bucket: Bucket) -> Tensor:
        weights_S = self._shard(bucket)
        # A graph depends on where an input begins within its memory, which would differ by rank: hence the copy.
        return weights_S.clone() if self.is_sharded else weights_S

    def _shard(self, bucket: Bucket) -> Tensor:
        """Return the shard [S] of a bucket's weights that this rank updates; all of them where nothing is sharded."""
        mesh = self._backend.mesh
        return bucket.shard(mesh.data_parallel_size, mesh.index("data")) if self.is_sharded else bucket.shard(1, 0)

    def _update_fused(
        self,
        units_U: Sequence[list[Tensor]],
        scale_1: Tensor,
        is_finite_1: Tensor,
        scalars_11: Tensor,
        is_decayed: bool,
    ) -> None:
        """Update all units of a bucket by torch's fused kernel, in one pass over memory; `_update` makes 15.

        The kernel computes the elements at a tensor's end that fill no vector with other bits. So it is given blocks:
        those depend neither on the number of ranks nor on the number of threads. It also writes the clipped gradients.
        """
        settings = self._settings
        rate, _, _, updates, *_ = scalars_11.unbind()
        weights_U, exp_avg_U, exp_avg_sq_U, gradients_U = units_U
        torch._fused_adamw_(
            weights_U,
            gradients_U,
            exp_avg_U,
            exp_avg_sq_U,
            [],
            [updates] * len(weights_U),
            lr=rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay if is_decayed else 0.0,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=scale_1.reciprocal(),
            found_inf=is_finite_1.logical_not().float(),
        )

    def _update(
        self,
        weights_U: Tensor,
        exp_avg_U: Tensor,
        exp_avg_sq_U: Tensor,
        gradient_U: Tensor,
        scale_1: Tensor,
        is_finite_1: Tensor,
        scalars_11: Tensor,
        is_decayed_1: Tensor,
    ) -> None:
        rate, correction1, correction2, _, beta1, rest1, beta2, rest2, epsilon, weight_decay, _ = scalars_11.unbind()
        clipped_U = gradient_U * scale_1
        new_exp_avg_U = beta1 * exp_avg_U + rest1 * clipped_U
        new_exp_avg_sq_U = beta2 * exp_avg_sq_U + rest2 * clipped_U.square()
        direction_U = (new_exp_avg_U / correction1) / ((new_exp_avg_sq_U / correction2).sqrt() + epsilon)
        decay_1 = is_decayed_1 * (rate * weight_decay)
        weights_U.copy_(torch.where(is_finite_1, weights_U - decay_1 * weights_U - rate * direction_U, weights_U))
        exp_avg_U.copy_(torch.where(is_finite_1, new_exp_avg_U, exp_avg_U))
        exp_avg_sq_U.copy_(torch.where(is_finite_1, new_exp_avg_sq_U, exp_avg_sq_U))
