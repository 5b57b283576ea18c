"""The train step: the one function that the compiler traces and the trainer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from services.common.program.backends.protocol import Backend
from services.common.program.buckets import choose_num_blocks, make_buckets
from services.common.program.llama import Llama, initialize
from services.common.program.loss import next_token_loss
from services.common.program.micro_batch import MicroBatch
from services.common.program.optimizer import AdamW, step_scalars
from services.common.program.reduction import RunningSum, TreeSum
from services.common.program.state import StateSlice
from services.common.program.worker_group import naming_workers_lost_in_graphs
from services.common.recipe import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        length, checkpointing = recipe.corpus.sequence_length, recipe.train.activation_checkpointing
        with backend.device:
            self.model = Llama(recipe.model, length, backend, checkpointing)
        initialize(self.model, recipe.model, recipe.train.seed)
        batch, is_compiled = recipe.batch, recipe.compile.enabled
        num_blocks = choose_num_blocks(batch.num_micro_batches, backend.mesh.data_parallel_size)
        self.buckets = make_buckets(dict(self.model.named_parameters()), self.model.layouts(), num_blocks)
        is_sharded = recipe.parallel.zero_stage > 0
        self.optimizer = AdamW(self.buckets, recipe.optimizer, backend, is_compiled, is_sharded)
        for bucket in self.buckets:
            bucket.cast(DTYPES[recipe.train.param_dtype])
        self._parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters.values()]
        self._new_sum = TreeSum if recipe.train.reduction == "exact" else RunningSum
        self._loss = backend.compile(self._micro_loss) if is_compiled else self._micro_loss

    @naming_workers_lost_in_graphs()
    def train_step(self, step: int, micro_batches: Iterable[MicroBatch], skipped_steps: int = 0) -> StepResult:
        """Update `step` (from 0) with this worker's share of the global batch, micro-batches on the host.

        `skipped_steps` of the steps before it were not applied. Raises `WorkersLost`.
        """
        losses, sums = TreeSum(), [self._new_sum() for _ in self.buckets]
        for micro_batch in micro_batches:
            loss = self._loss(*micro_batch.to(self.backend.device))
            gradients = deque(torch.autograd.grad(loss, self._parameters))
            for bucket, total in zip(self.buckets, sums, strict=True):  # frees a bucket's gradients as it adds them
                total.add(bucket.flatten(gradients.popleft() for _ in bucket.parameters))
            losses.add(loss.detach().reshape(1))
            self.backend.end_graph()
        count = self.recipe.batch.num_micro_batches
        loss_1 = self.backend.all_reduce(losses.result(), "data") / count
        scalars_3 = step_scalars(self.recipe.optimizer, step, skipped_steps).to(self.backend.device)
        norm, is_applied = self.optimizer.step([total.result() for total in sums], count, scalars_3)
        self.backend.end_graph()
        return StepResult(loss_1.squeeze(0), norm, is_applied)

    @naming_workers_lost_in_graphs()
    @torch.no_grad()
    def evaluate(self, read: Callable[[int], MicroBatch], count: int) -> Tensor:
        """Mean loss over the micro-batches `read(0)` to `read(count - 1)`, shared by the workers. A scalar on the
        device. Raises `WorkersLost`.

        In each round every worker takes one, and all learn of all losses: the mean has the same bits on each worker and
        for every number of them, and none waits longer than for one forward pass.
        """
        losses: list[Tensor] = []
        device = self.backend.device
        while len(losses) < count:
            mine = len(losses) + self.backend.mesh.index("data")
            loss = self._loss(*read(mine).to(device)) if mine < count else torch.zeros((), device=device)
            losses += self.backend.all_gather(loss.reshape(1), "data").unbind()
            self.backend.end_graph()
        return torch.stack(losses[:count]).mean()

    def is_finite(self) -> Tensor:
        """Are all weights of the model numbers? One that is not stays so, whatever the gradients are. A scalar on the
        device.
        """
        extremes = [torch.stack(torch.aminmax(bucket.weights_P)) for bucket in self.buckets]
        is_bad_1 = torch.stack(extremes).isfinite().all().logical_not().float().reshape(1)
        return self.backend.all_reduce(is_bad_1, "tensor", "max").squeeze(0) == 0

    def digests(self) -> dict[str, int]:
        """A 63-bit hash over the bytes of each part of the state that all workers of the data axis hold whole: equal on
        them as long as their bits are.
        """
        parts = {"weights": [bucket.weights_P for bucket in self.buckets]}
        if not self.optimizer.is_sharded:
            parts |= {"first moments": self.optimizer.exp_avg_S, "second moments": self.optimizer.exp_avg_sq_S}
            if self.recipe.train.param_dtype != "float32":
                parts["master weights"] = self.optimizer.state()["weight"]
        return {name: _digest(tensors) for name, tensors in parts.items()}

    def held_state(self) -> dict[StateSlice, Tensor]:
        """All of the state that this worker holds: flat tensors that share its memory.

        After they were written to, `update_weights` has to be called.
        """
        return self._slice_state(is_owned=False)

    def owned_state(self) -> dict[StateSlice, Tensor]:
        """Of `held_state` what this worker alone answers for: all workers' together is the state, each element once."""
        return self._slice_state(is_owned=True)

    def update_weights(self) -> None:
        """Make the model's weights those of the state. All workers call it."""
        self.optimizer.update_weights()

    def shapes(self) -> dict[str, torch.Size]:
        """Of the model's full parameters, by name."""
        layouts = self.model.layouts()
        return {name: layouts[name].full_shape(each.shape) for name, each in self.model.named_parameters()}

    def _slice_state(self, is_owned: bool) -> dict[StateSlice, Tensor]:
        mesh, layouts = self.backend.mesh, self.model.layouts()
        slices: dict[StateSlice, Tensor] = {}
        for number, bucket in enumerate(self.buckets):
            is_copy = bucket.sum_axis is not None and mesh.index(bucket.sum_axis) > 0
            if is_owned and is_copy:
                continue
            share = len(bucket.weights_P) // mesh.data_parallel_size
            first = mesh.index("data") * share
            begin = first if self.optimizer.is_sharded else 0  # of what is held
            start, stop = (first, first + share) if is_owned else (begin, begin + len(self.optimizer.exp_avg_S[number]))
            for name, run_start, run_stop, place in bucket.runs(start, stop):
                box = layouts[name].box(bucket.parameters[name].shape)
                for kind, held in self.optimizer.state().items():
                    elements = held[number][place - begin :][: run_stop - run_start]
                    slices[StateSlice(kind, name, box, run_start, run_stop)] = elements
        return slices

    def _micro_loss(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        with self.backend.autocast(self.recipe.train.dtype):
            hidden_BSD = self.model(tokens_BS[:, :-1], positions_BS)
            chunk_tokens, z_loss = self.recipe.batch.loss_chunk_tokens, self.recipe.train.z_loss
            lm_head_VD, targets_BS = self.model.lm_head.weight, tokens_BS[:, 1:]
            return next_token_loss(hidden_BSD, lm_head_VD, targets_BS, chunk_tokens, self.backend, z_loss)


def _digest(tensors: Sequence[Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.intdigest() >> 1
