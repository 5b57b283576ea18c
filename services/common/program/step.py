"""The train step: the one function that the compiler traces and the trainer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from services.common.program.backends.protocol import Backend
from services.common.program.buckets import choose_num_blocks, make_buckets
from services.common.program.llama import Llama, initialize
from services.common.program.loss import next_token_loss
from services.common.program.optimizer import AdamW, step_scalars
from services.common.program.reduction import TreeSum
from services.common.recipe import Recipe


class StepResult(NamedTuple):
    """Scalars on the device; they are read through `Backend.defer`."""

    loss: Tensor
    """Mean over the global batch, nats per token."""
    gradient_norm: Tensor
    """Before clipping."""
    is_applied: Tensor
    """False when a gradient was not finite and the update was skipped."""


class Program:
    """The model, or this worker's part of it, its optimizer state and the step."""

    def __init__(self, recipe: Recipe, backend: Backend) -> None:
        self.recipe = recipe
        self.backend = backend
        self.model = Llama(recipe.model, recipe.corpus.sequence_length, backend, recipe.train.activation_checkpointing)
        initialize(self.model, recipe.model, recipe.train.seed)
        batch, is_compiled = recipe.batch, recipe.compile.enabled
        num_blocks = choose_num_blocks(batch.num_micro_batches, backend.mesh.data_parallel_size)
        self.buckets = make_buckets(dict(self.model.named_parameters()), self.model.layouts(), num_blocks)
        is_sharded = recipe.parallel.zero_stage > 0
        self.optimizer = AdamW(self.buckets, recipe.optimizer, backend, is_compiled, is_sharded)
        self._parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters.values()]
        self._loss = backend.compile(self._micro_loss) if is_compiled else self._micro_loss

    def train_step(self, step: int, micro_batches: Iterable[Tensor], skipped_steps: int = 0) -> StepResult:
        """Update `step` (from 0) with this worker's share of the global batch, micro-batches of tokens [B, L + 1].

        `skipped_steps` of the steps before it were not applied.
        """
        losses, sums = TreeSum(), [TreeSum() for _ in self.buckets]
        for tokens_BS in micro_batches:
            loss = self._loss(tokens_BS)
            gradients = iter(torch.autograd.grad(loss, self._parameters))
            for bucket, total in zip(self.buckets, sums, strict=True):
                total.add(bucket.flatten(islice(gradients, len(bucket.parameters))))
            losses.add(loss.detach().reshape(1))
            self.backend.end_graph()
        count = self.recipe.batch.num_micro_batches
        loss_1 = self.backend.all_reduce(losses.result(), "data") / count
        scalars_3 = step_scalars(self.recipe.optimizer, step, skipped_steps)
        norm, is_applied = self.optimizer.step([total.result() for total in sums], count, scalars_3)
        self.backend.end_graph()
        return StepResult(loss_1.squeeze(0), norm, is_applied)

    @torch.no_grad()
    def evaluate(self, read: Callable[[int], Tensor], count: int) -> Tensor:
        """Mean loss over the micro-batches `read(0)` to `read(count - 1)` of tokens [B, L + 1], shared by the workers.
        A scalar on the device.

        In each round every worker takes one, and all learn of all losses: the mean has the same bits on each worker and
        for every number of them, and none waits longer than for one forward pass.
        """
        losses: list[Tensor] = []
        while len(losses) < count:
            mine = len(losses) + self.backend.mesh.index("data")
            loss = self._loss(read(mine)) if mine < count else torch.zeros((), device=self.backend.device)
            losses += self.backend.all_gather(loss.reshape(1), "data").unbind()
            self.backend.end_graph()
        return torch.stack(losses[:count]).mean()

    def is_finite(self) -> Tensor:
        """Are all weights numbers? One that is not stays so, whatever the gradients are. A scalar on the device."""
        extremes = [torch.stack(torch.aminmax(bucket.weights_P)) for bucket in self.buckets]
        return torch.stack(extremes).isfinite().all()

    def digests(self) -> dict[str, int]:
        """A 63-bit hash over the bytes of each part of the state that all workers of the data axis hold whole: equal on
        them as long as their bits are.
        """
        parts = {"weights": [bucket.weights_P for bucket in self.buckets]}
        if not self.optimizer.is_sharded:
            parts |= {"first moments": self.optimizer.exp_avg_S, "second moments": self.optimizer.exp_avg_sq_S}
        return {name: _digest(tensors) for name, tensors in parts.items()}

    def weights(self) -> dict[str, Tensor]:
        """Float32 master weights by Hugging Face name; views, not copies."""
        return self._views([bucket.weights_P for bucket in self.buckets])

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments as `first/<name>` and `second/<name>`. Where they are sharded, all workers have to ask."""
        exp_avg_P, exp_avg_sq_P = self.optimizer.moments()
        first = {f"first/{name}": view for name, view in self._views(exp_avg_P).items()}
        second = {f"second/{name}": view for name, view in self._views(exp_avg_sq_P).items()}
        return first | second

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take weights and moments, as `weights()` and `moments()` name them."""
        for name, view in self.weights().items():
            view.copy_(tensors[name])
        self.optimizer.load(self._flatten(tensors, "first/"), self._flatten(tensors, "second/"))

    def state_shapes(self) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
        """Shapes of what `weights()` and `moments()` return."""
        weights = {name: view.shape for name, view in self.weights().items()}
        return weights, {f"{part}/{name}": shape for part in ("first", "second") for name, shape in weights.items()}

    def _flatten(self, tensors: dict[str, Tensor], prefix: str) -> Iterator[Tensor]:
        """One bucket at a time: together they would be another copy of the state."""
        for bucket in self.buckets:
            yield bucket.flatten(tensors[prefix + name] for name in bucket.parameters)

    def _micro_loss(self, tokens_BS: Tensor) -> Tensor:
        with self.backend.autocast(self.recipe.train.dtype):
            hidden_BSD = self.model(tokens_BS[:, :-1])
            chunk_tokens = self.recipe.batch.loss_chunk_tokens
            lm_head_VD, targets_BS = self.model.lm_head.weight, tokens_BS[:, 1:]
            return next_token_loss(hidden_BSD, lm_head_VD, targets_BS, chunk_tokens, self.backend)

    def _views(self, flat_P: Sequence[Tensor]) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for bucket, tensor_P in zip(self.buckets, flat_P, strict=True):
            views |= bucket.views(tensor_P)
        return views


def _digest(tensors: Sequence[Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.cpu().numpy().data)
    return digest.intdigest() >> 1
