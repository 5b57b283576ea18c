"""AdamW on buckets of parameters, a global gradient clip, and the learning-rate schedule.

Shape suffixes: K buckets, N blocks of a bucket, P elements of a bucket, S elements of this worker's share of one, B
elements of a block, 1 and 4 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.common.program.backends.protocol import Backend
from services.common.program.buckets import Bucket
from services.common.program.state import StateKind
from services.common.recipe import Optimizer

ROW = 16_384
FUSED_DEVICES = ("cpu", "cuda")
"""Devices for which torch has a kernel of AdamW that goes over memory once."""


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Rate of the update number `step` (from 0): linear warm-up, then cosine decay. A function of the step alone."""
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    progress = min(1.0, (step - optimizer.warmup_steps) / (optimizer.decay_steps - optimizer.warmup_steps))
    span = optimizer.learning_rate - optimizer.min_learning_rate
    return optimizer.min_learning_rate + span * 0.5 * (1.0 + math.cos(math.pi * progress))


def step_scalars(optimizer: Optimizer, step: int, skipped_steps: int = 0) -> Tensor:
    """[4] float32: the learning rate, AdamW's two bias corrections, and the number of updates that they count. A
    tensor, so that no graph bakes a step in.

    The moments are means over the updates that were applied, so the corrections count those: `skipped_steps` of the
    steps before this one were not.
    """
    updates = step + 1 - skipped_steps
    corrections = (1.0 - optimizer.beta1**updates, 1.0 - optimizer.beta2**updates)
    return torch.tensor([learning_rate(optimizer, step), *corrections, updates], dtype=torch.float32)


def sum_of_squares(x_B: Tensor) -> Tensor:
    """[1], in one pass over memory. A thread sums whole rows, so that the bits do not depend on how many there are."""
    whole = len(x_B) // ROW * ROW
    rows, rest = x_B[:whole].view(-1, ROW), x_B[whole:].view(1, -1)
    norms = torch.cat([torch.linalg.vector_norm(each, dim=1) for each in (rows, rest)])
    return norms.square().sum(0, keepdim=True)


class AdamW:
    """AdamW (arXiv 1711.05101) with a global gradient clip, block by block over buckets of parameters.

    Sharded, each worker of the data axis updates its share of every bucket and holds the moments of that alone (ZeRO-1,
    arXiv 1910.02054). The bits are the same: a block's update does not depend on who has the block, and the clip's norm
    sums the blocks' sums in one order. Both moments begin at 0.

    The weights that are updated are float32 masters: the model's own, a share's copy, or, once the buckets are cast to
    a narrower type, what the model's are rounded from (arXiv 1710.03740, section 3.1).
    """

    def __init__(
        self, buckets: Sequence[Bucket], settings: Optimizer, backend: Backend, is_compiled: bool, is_sharded: bool
    ) -> None:
        self._buckets, self._settings, self._backend = buckets, settings, backend
        self.is_sharded = is_sharded and backend.mesh.data_parallel_size > 1
        # A share within the bucket's memory would be another graph on each worker: a graph knows where an input begins.
        self._weights_S = [backend.place(self._share(bucket.weights_P)) for bucket in buckets]
        if self.is_sharded and not backend.is_lazy:
            self._weights_S = [share_S.clone() for share_S in self._weights_S]
        self.exp_avg_S = [backend.place(torch.zeros_like(self._share(bucket.weights_P))) for bucket in buckets]
        self.exp_avg_sq_S = [backend.place(torch.zeros_like(self._share(bucket.weights_P))) for bucket in buckets]
        copies = [backend.mesh.size(bucket.sum_axis) if bucket.sum_axis else 1 for bucket in buckets]
        self._counted_K = backend.place(torch.tensor([1.0 / each for each in copies]))
        """How much of a bucket's squares this worker adds to the norm: copies of parameters count once."""
        self._is_decayed_1 = [backend.place(torch.full((1,), float(bucket.is_decayed))) for bucket in buckets]
        # On a GPU torch's kernel takes all blocks at once, where compiled code is launched for each of them.
        self._is_fused = backend.device.type in FUSED_DEVICES and (not is_compiled or backend.device.type == "cuda")
        is_update_compiled = is_compiled and not self._is_fused
        update = self._update
        self._update_block: Callable[..., None] = backend.compile_elementwise(update) if is_update_compiled else update
        self._sum_of_squares = _square_and_sum if backend.is_lazy else sum_of_squares

    @torch.no_grad()
    def step(self, sums_P: Sequence[Tensor], divisor: int, scalars_4: Tensor) -> tuple[Tensor, Tensor]:
        """One update with `step_scalars` and what this worker's micro-batches sum up to, a flat tensor for each bucket,
        which is consumed where the update is applied.

        The sum over all workers is `divisor` times the gradient. Returns (gradient norm before clipping, was it
        applied), [1] on the device. When the norm is not finite nothing changes: a poisoned gradient must not reach the
        weights or the moments.
        """
        gradients_S = [self._reduce(bucket, sum_P) for bucket, sum_P in zip(self._buckets, sums_P, strict=True)]
        blocks = [bucket.blocks(gradient_S) for bucket, gradient_S in zip(self._buckets, gradients_S, strict=True)]
        squares_NK = torch.stack([torch.cat(list(map(self._sum_of_squares, each))) for each in blocks], dim=1)
        if self.is_sharded:
            squares_NK = self._backend.all_gather(squares_NK, "data")
        squares_1 = (squares_NK.sum(0) * self._counted_K).sum(0, keepdim=True)
        norm_1 = self._backend.all_reduce(squares_1, "tensor").sqrt() / divisor
        is_finite_1 = torch.isfinite(norm_1)
        scale_1 = torch.clamp(self._settings.max_grad_norm / (norm_1 + 1e-6), max=1.0) / divisor
        for number, bucket in enumerate(self._buckets):
            tensors_S = (
                self._weights_S[number],
                self.exp_avg_S[number],
                self.exp_avg_sq_S[number],
                gradients_S[number],
            )
            if self._is_fused:
                blocks_B = [bucket.blocks(each) for each in tensors_S]
                self._update_fused(blocks_B, scale_1, is_finite_1, scalars_4, bucket.is_decayed)
                continue
            for tensors_B in [tensors_S] if self._backend.is_lazy else zip(*map(bucket.blocks, tensors_S), strict=True):
                self._update_block(*tensors_B, scale_1, is_finite_1, scalars_4, self._is_decayed_1[number])
        self.update_weights()
        return norm_1, is_finite_1

    def state(self) -> dict[StateKind, list[Tensor]]:
        """What this worker holds of each bucket [S]: its share of it, or all of it where nothing is sharded."""
        return {"weight": self._weights_S, "exp_avg": self.exp_avg_S, "exp_avg_sq": self.exp_avg_sq_S}

    def update_weights(self) -> None:
        """Make the model's weights those of the state, in the model's type; all workers gather their shares in it."""
        for bucket, weights_S in zip(self._buckets, self._weights_S, strict=True):
            is_sharded = self.is_sharded
            bucket.write(self._backend.all_gather(weights_S.to(bucket.dtype), "data") if is_sharded else weights_S)

    def _share(self, flat_P: Tensor) -> Tensor:
        """What this worker updates of a bucket [S]; without shards all of it."""
        mesh = self._backend.mesh
        return flat_P.chunk(mesh.data_parallel_size)[mesh.index("data")] if self.is_sharded else flat_P

    def _reduce(self, bucket: Bucket, sum_P: Tensor) -> Tensor:
        """This worker's share of the sum over all workers; over the data axis first, where the tree begins."""
        reduce = self._backend.reduce_scatter if self.is_sharded else self._backend.all_reduce
        gradient_S = reduce(sum_P, "data")
        return self._backend.all_reduce(gradient_S, bucket.sum_axis) if bucket.sum_axis else gradient_S

    def _update_fused(
        self,
        blocks_B: Sequence[list[Tensor]],
        scale_1: Tensor,
        is_finite_1: Tensor,
        scalars_4: Tensor,
        is_decayed: bool,
    ) -> None:
        """All blocks of a bucket, by torch's own kernel: `_update`, operation by operation, is 15 passes over memory.

        What is no full vector at a tensor's end is computed otherwise, so it gets blocks: those do not depend on the
        number of workers, and the vectors of one not on the number of threads. It writes the clipped gradients, too.
        """
        settings = self._settings
        rate, _, _, updates = scalars_4.unbind()
        weights_B, exp_avg_B, exp_avg_sq_B, gradients_B = blocks_B
        torch._fused_adamw_(
            weights_B,
            gradients_B,
            exp_avg_B,
            exp_avg_sq_B,
            [],
            [updates] * len(weights_B),
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
        weights_B: Tensor,
        exp_avg_B: Tensor,
        exp_avg_sq_B: Tensor,
        gradient_B: Tensor,
        scale_1: Tensor,
        is_finite_1: Tensor,
        scalars_4: Tensor,
        is_decayed_1: Tensor,
    ) -> None:
        settings = self._settings
        rate, correction1, correction2, _ = scalars_4.unbind()
        clipped_B = gradient_B * scale_1
        new_exp_avg_B = settings.beta1 * exp_avg_B + (1.0 - settings.beta1) * clipped_B
        new_exp_avg_sq_B = settings.beta2 * exp_avg_sq_B + (1.0 - settings.beta2) * clipped_B.square()
        direction_B = (new_exp_avg_B / correction1) / ((new_exp_avg_sq_B / correction2).sqrt() + settings.epsilon)
        decay_1 = is_decayed_1 * (rate * settings.weight_decay)
        weights_B.copy_(torch.where(is_finite_1, weights_B - decay_1 * weights_B - rate * direction_B, weights_B))
        exp_avg_B.copy_(torch.where(is_finite_1, new_exp_avg_B, exp_avg_B))
        exp_avg_sq_B.copy_(torch.where(is_finite_1, new_exp_avg_sq_B, exp_avg_sq_B))


def _square_and_sum(x_B: Tensor) -> Tensor:
    return x_B.square().sum(0, keepdim=True)
