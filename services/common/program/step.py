"""The train step: the one function that the compiler traces and the trainer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from services.common.program.backends.protocol import Backend
from services.common.program.flat import FlatParameters
from services.common.program.llama import Llama, initialize
from services.common.program.loss import next_token_loss
from services.common.program.optimizer import step_scalars, update_in_place
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
    """The model, its optimizer state and the step, on one worker of a data-parallel group."""

    def __init__(self, recipe: Recipe, backend: Backend) -> None:
        self.recipe = recipe
        self.backend = backend
        self.model = Llama(recipe.model, recipe.corpus.sequence_length)
        initialize(self.model, recipe.model, recipe.train.seed)
        self.flat = FlatParameters(self.model)
        self.exp_avg_P = torch.zeros_like(self.flat.weights_P)
        self.exp_avg_sq_P = torch.zeros_like(self.flat.weights_P)
        is_compiled = recipe.compile.enabled
        self._loss = backend.compile(self._micro_loss) if is_compiled else self._micro_loss
        self._update = backend.compile(self._apply_gradient) if is_compiled else self._apply_gradient

    def train_step(self, step: int, micro_batches: Iterable[Tensor], skipped_steps: int = 0) -> StepResult:
        """Update `step` (from 0) with this worker's share of the global batch, micro-batches of tokens [B, L + 1].

        `skipped_steps` of the steps before it were not applied.
        """
        total = TreeSum()
        for tokens_BS in micro_batches:
            loss = self._loss(tokens_BS)
            gradients = torch.autograd.grad(loss, self.flat.parameters)
            total.add(self.flat.flatten(gradients, extra=loss.detach()))
            self.backend.end_graph()
        summed_P1 = self.backend.all_reduce(total.result(), "data")
        summed_P1 /= self.recipe.batch.num_micro_batches
        norm, is_applied = self._update(summed_P1[:-1], step_scalars(self.recipe.optimizer, step, skipped_steps))
        self.backend.end_graph()
        return StepResult(summed_P1[-1], norm, is_applied)

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
        return torch.stack(torch.aminmax(self.flat.weights_P)).isfinite().all()

    def digests(self) -> dict[str, int]:
        """A 63-bit hash over the bytes of each part of the state: equal on all workers as long as their bits are."""
        parts = {"weights": self.flat.weights_P, "first moments": self.exp_avg_P, "second moments": self.exp_avg_sq_P}
        return {name: xxhash.xxh3_64_intdigest(part.cpu().numpy().data) >> 1 for name, part in parts.items()}

    def weights(self) -> dict[str, Tensor]:
        """Float32 master weights by Hugging Face name; views, not copies."""
        return self.flat.views(self.flat.weights_P)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments as `first/<name>` and `second/<name>`; views, not copies."""
        first = {f"first/{name}": view for name, view in self.flat.views(self.exp_avg_P).items()}
        second = {f"second/{name}": view for name, view in self.flat.views(self.exp_avg_sq_P).items()}
        return first | second

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take weights and moments, as `weights()` and `moments()` name them."""
        for name, view in (self.weights() | self.moments()).items():
            view.copy_(tensors[name])

    def _micro_loss(self, tokens_BS: Tensor) -> Tensor:
        with self.backend.autocast(self.recipe.train.dtype):
            hidden_BSD = self.model(tokens_BS[:, :-1])
            chunk_tokens = self.recipe.batch.loss_chunk_tokens
            return next_token_loss(hidden_BSD, self.model.lm_head.weight, tokens_BS[:, 1:], chunk_tokens)

    def _apply_gradient(self, gradient_P: Tensor, scalars_3: Tensor) -> tuple[Tensor, Tensor]:
        return update_in_place(
            self.flat.weights_P,
            self.exp_avg_P,
            self.exp_avg_sq_P,
            gradient_P,
            scalars_3,
            self.recipe.optimizer,
            self.flat.num_decayed,
        )
