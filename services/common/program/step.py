"""The train step: the one function that the compiler traces and the trainer runs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from services.common.program.backends.protocol import Backend
from services.common.program.buckets import Bucket, SeparateBucket, choose_num_blocks, make_buckets
from services.common.program.llama import Llama, initialize
from services.common.program.loss import next_token_loss
from services.common.program.micro_batch import MicroBatch
from services.common.program.optimizer import AdamW, step_scalars
from services.common.program.reduction import HeldSum, RunningSum, TreeSum
from services.common.program.snapshot import Snapshots
from services.common.program.state import StateKind, StateSlice
from services.common.program.worker_group import naming_workers_lost_in_graphs
from services.common.recipe import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepResult(NamedTuple):
    """Each [1] on the device; they are read through `Backend.defer`."""

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
        self._reduce_dtype = DTYPES[recipe.parallel.reduce_dtype]
        with backend.device:
            self.model = Llama(recipe.model, length, backend, checkpointing, self._reduce_dtype)
        is_compiled = recipe.compile.enabled
        with backend.host:
            initialize(self.model, recipe.model, recipe.train.seed, backend.place)
            self.buckets = self._make_buckets()
            is_sharded = recipe.parallel.zero_stage > 0
            self.optimizer = AdamW(self.buckets, recipe.optimizer, backend, is_compiled, is_sharded)
            self._cast_buckets()
            self._sums = [self._make_sum(bucket.size) for bucket in self.buckets]
            self._losses = self._make_sum(1) if backend.is_lazy else TreeSum()
        self._parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters.values()]
        self._run_loss = backend.compile(self._micro_loss) if is_compiled else self._micro_loss
        self._host_state: dict[StateKind, list[Tensor]] = {}
        self._snapshots = Snapshots(backend.device)
        self._own_gradients: list[Tensor] = []
        self._own_losses: list[Tensor] = []
        self.gradient_seconds = 0.0
        """Of the last step, until this worker's gradient was there; on a device that computes by itself, until it was
        asked for."""

    @naming_workers_lost_in_graphs()
    def train_step(self, step: int, micro_batches: Iterable[MicroBatch], skipped_steps: int = 0) -> StepResult:
        """Update `step` (from 0) with this worker's share of the global batch, micro-batches on the host.

        `skipped_steps` of the steps before it were not applied. Raises `WorkersLost`.
        """
        started = time.perf_counter()
        self._own_losses.clear()
        for micro_batch in micro_batches:
            self._add_gradients(micro_batch)
            self.backend.end_graph()
        self.gradient_seconds = time.perf_counter() - started
        count = self.recipe.batch.num_micro_batches
        loss_1 = self.backend.all_reduce(self._losses.result(), "data") / count
        scalars_4 = step_scalars(self.recipe.optimizer, step, skipped_steps).to(self.backend.device)
        gradients = [total.result() for total in self._sums]
        self._snapshots.hold()
        norm_1, is_applied_1 = self.optimizer.step(gradients, count, scalars_4)
        if not self.backend.is_lazy:
            self._own_gradients = gradients
        del gradients  # on a lazy device a tensor that is alive when the graph ends is one of its outputs
        self.backend.end_graph()
        return StepResult(loss_1, norm_1, is_applied_1)

    def largest_loss(self) -> float:
        """Of the last step's micro-batches on this worker, in nats per token; waits for the device.

        NaN where one is no number, and where the device is lazy: there it would be one more output of the graph.
        """
        return float(torch.cat(self._own_losses).max()) if self._own_losses else math.nan

    def forget_gradients(self) -> None:
        """Free what `compute_again` would compare with: the next step needs the memory."""
        self._own_gradients.clear()

    @naming_workers_lost_in_graphs()
    def compute_again(self, micro_batches: Iterable[MicroBatch]) -> tuple[bool, bool]:
        """Was this worker's own gradient of the last step finite, before any reduction over the data axis, and is it
        finite when the same micro-batches are computed again? Nothing is updated. All workers call it.

        Not where the device is lazy, and not after `forget_gradients`.
        """
        assert self._own_gradients
        self._own_losses.clear()
        was_finite = _are_finite(self._own_gradients)
        self.forget_gradients()
        for micro_batch in micro_batches:
            self._add_gradients(micro_batch)
        self._losses.result()
        return was_finite, _are_finite([total.result() for total in self._sums])

    @naming_workers_lost_in_graphs()
    @torch.no_grad()
    def evaluate(self, read: Callable[[int], MicroBatch], count: int) -> Tensor:
        """Mean loss over the micro-batches `read(0)` to `read(count - 1)`, shared by the workers. A scalar on the
        host. Raises `WorkersLost`.

        In each round every worker takes one, and all learn of all losses: the mean has the same bits on each worker and
        for every number of them, and none waits longer than for one forward pass. One that the last round has nothing
        for takes the last again: all workers run the same graphs.
        """
        rounds: list[Tensor] = []
        mesh = self.backend.mesh
        for first in range(0, count, mesh.data_parallel_size):
            rounds.append(self._gather_losses(read(min(first + mesh.index("data"), count - 1))))
            self.backend.end_graph()
        return torch.cat([self.backend.to_host(losses) for losses in rounds])[:count].mean()

    @torch.no_grad()
    def is_finite(self) -> Tensor:
        """Are all weights of the model numbers? One that is not stays so, whatever the gradients are. [1] on the
        device.
        """
        is_finite_1 = self.backend.all_reduce(self._find_bad_weights(), "tensor", "max") == 0
        self.backend.end_graph()
        return is_finite_1

    def digests(self) -> dict[str, int]:
        """A 63-bit hash over the bytes of each part of the state that all workers of the data axis hold whole: equal on
        them as long as their bits are.
        """
        parts = {"weights": [each for bucket in self.buckets for each in bucket.weights]}
        if not self.optimizer.is_sharded:
            parts |= {"first moments": self.optimizer.exp_avg_S, "second moments": self.optimizer.exp_avg_sq_S}
            if any(bucket.dtype != torch.float32 for bucket in self.buckets):
                parts["master weights"] = self.optimizer.state()["weight"]
        return {name: _digest(map(self.backend.to_host, tensors)) for name, tensors in parts.items()}

    def held_state(self) -> dict[StateSlice, Tensor]:
        """All of the state that this worker holds: flat tensors on the host.

        After they were written to, `update_weights` has to be called.
        """
        self._host_state = self._copy_to_host()
        return self._slice_state(self._host_state, is_owned=False)

    def begin_snapshot(self) -> Callable[[], dict[StateSlice, Tensor]]:
        """Begin to copy to the host what this worker alone answers for of `held_state`: all workers' copies together
        are the state, each element once. Returns a function that returns the copy once it is there, in any thread.

        The copy lasts until the next one begins, for which the caller has to have waited for this one.
        """
        # A view of a tensor on a lazy device would be a graph of its own.
        state = self._copy_to_host() if self.backend.is_lazy else self.optimizer.state()
        return self._snapshots.begin(self._slice_state(state, is_owned=True))

    @torch.no_grad()
    def update_weights(self) -> None:
        """Make the model's weights those of the state. All workers call it."""
        self._snapshots.hold()
        for kind, tensors in self.optimizer.state().items():
            for held, written in zip(tensors, self._host_state.pop(kind, tensors), strict=True):
                if written is not held:
                    held.copy_(self.backend.place(written))
        self.optimizer.update_weights()
        self.backend.end_graph()

    def shapes(self) -> dict[str, torch.Size]:
        """Of the model's full parameters, by name."""
        shardings = self.model.shardings()
        return {name: shardings[name].full_shape(each.shape) for name, each in self.model.named_parameters()}

    def _copy_to_host(self) -> dict[StateKind, list[Tensor]]:
        """The optimizer's state; itself where the device is the host."""
        return {kind: list(map(self.backend.to_host, held)) for kind, held in self.optimizer.state().items()}

    def _slice_state(self, state: Mapping[StateKind, Sequence[Tensor]], is_owned: bool) -> dict[StateSlice, Tensor]:
        mesh, shardings = self.backend.mesh, self.model.shardings()
        slices: dict[StateSlice, Tensor] = {}
        for number, bucket in enumerate(self.buckets):
            is_copy = bucket.sum_axis is not None and mesh.index(bucket.sum_axis) > 0
            if is_owned and is_copy:
                continue
            share = bucket.size // mesh.data_parallel_size
            first = mesh.index("data") * share
            begin = first if self.optimizer.is_sharded else 0  # of what is held
            start, stop = (first, first + share) if is_owned else (begin, begin + len(self.optimizer.exp_avg_S[number]))
            for name, run_start, run_stop, place in bucket.runs(start, stop):
                box = shardings[name].box(bucket.parameters[name].shape)
                for kind, held in state.items():
                    elements = held[number][place - begin :][: run_stop - run_start]
                    slices[StateSlice(kind, name, box, run_start, run_stop)] = elements
        return slices

    def _make_buckets(self) -> list[Bucket]:
        backend, parameters = self.backend, dict(self.model.named_parameters())
        num_blocks = choose_num_blocks(self.recipe.batch.num_micro_batches, backend.mesh.data_parallel_size)
        new_bucket = partial(SeparateBucket, place=backend.place, to_host=backend.to_host)
        return make_buckets(parameters, self.model.shardings(), num_blocks, new_bucket if backend.is_lazy else Bucket)

    def _cast_buckets(self) -> None:
        """Give the model's weights the types that it computes with.

        What autocast would round at each use is rounded once an update, without a pass over the weights and one over
        their gradients for each micro-batch. Without compilation or a split head these are autocast's bits; else the
        gradients of a weight that is used several times are rounded once more. A lazy device leaves it to autocast.
        """
        train, rounded = self.recipe.train, self.model.weights_of_products()
        for bucket in self.buckets:
            is_rounded = not self.backend.is_lazy and bucket.parameters.keys() <= rounded
            bucket.cast(DTYPES[train.dtype if is_rounded else train.param_dtype])

    def _make_sum(self, size: int) -> TreeSum | RunningSum | HeldSum:
        """Of gradients, or of losses."""
        if self.backend.is_lazy:
            return HeldSum(self.backend.place(torch.zeros(size)))
        return TreeSum() if self.recipe.train.reduction == "exact" else RunningSum()

    def _add_gradients(self, micro_batch: MicroBatch) -> None:
        """And the loss. When this returns, nothing else of the pass is alive."""
        loss = self._loss(micro_batch)
        gradients = deque(torch.autograd.grad(loss, self._parameters))
        for bucket, total in zip(self.buckets, self._sums, strict=True):  # frees a bucket's gradients as it adds them
            total.add(bucket.flatten(gradients.popleft() for _ in bucket.parameters))
        if not self.backend.is_lazy:
            self._own_losses.append(loss.detach().reshape(1).clone())  # the sum consumes what it is given
        self._losses.add(loss.detach().reshape(1))

    def _gather_losses(self, micro_batch: MicroBatch) -> Tensor:
        """The loss of this worker's, and those of the others' at the same time."""
        loss = self._loss(micro_batch)
        return self.backend.all_gather(loss.reshape(1), "data")

    def _find_bad_weights(self) -> Tensor:
        """[1]: 1 where one of this worker's weights is no number."""
        weights = [each for bucket in self.buckets for each in bucket.weights]
        extremes = [extreme for each in weights for extreme in (each.min(), each.max())]
        return torch.stack(extremes).isfinite().all().logical_not().float().reshape(1)

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        # Outside of what is compiled: AOTAutograd keeps no graph that enters it, and traces that again at each start.
        with self.backend.autocast(self.recipe.train.dtype):
            return self._run_loss(*micro_batch.to(self.backend.device))

    def _micro_loss(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        hidden_BSD = self.model(tokens_BS[:, :-1], positions_BS)
        chunk_tokens, z_loss = self.recipe.batch.loss_chunk_tokens, self.recipe.train.z_loss
        lm_head_VD, targets_BS, backend = self.model.lm_head.weight, tokens_BS[:, 1:], self.backend
        return next_token_loss(hidden_BSD, lm_head_VD, targets_BS, chunk_tokens, backend, z_loss, self._reduce_dtype)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.intdigest() >> 1
