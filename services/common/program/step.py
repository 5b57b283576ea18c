"""The train step: the one function that the compiler traces and the trainer runs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.common.program.backends.backend import Backend
from services.common.program.buckets import choose_num_blocks, make_buckets
from services.common.program.health import Health, measure_activations, name_groups
from services.common.program.initial_weights import draw_weights
from services.common.program.layer_by_layer import LayerByLayer, Tail, make_sharded_bucket, make_without_memory
from services.common.program.loss import next_token_loss, next_token_losses
from services.common.program.micro_batch import MicroBatch
from services.common.program.optimizer import AdamW, step_scalars
from services.common.program.process_group import naming_lost_workers
from services.common.program.reduction import WorkersSum
from services.common.program.sharded_state import ShardedState
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepResult(NamedTuple):
    """Results of one train step, each [1] on the device; `Backend.read` waits for them."""

    loss: Tensor
    """Mean loss over the global batch, in nats per token."""
    gradient_norm: Tensor
    """Global norm of the gradient before clipping."""
    is_applied: Tensor
    """Whether the update was applied: False where the gradient was not finite."""


class Recomputation(NamedTuple):
    """Outcome of computing a step's gradient twice on one rank, before any reduction over the data axis."""

    was_finite: bool
    """Whether the gradient that the step computed was finite."""
    is_finite: bool
    """Whether the gradient that was computed again is finite."""


class Program:
    """One rank's shard of the model and of its optimizer, the train step, and the losses of an evaluation."""

    def __init__(self, recipe: Recipe, backend: Backend, *, draws_weights: bool = True) -> None:
        """Make the program with its initial weights, or with weights of zero where the caller writes other ones.

        All workers make it together, with the same `draws_weights`. Raises `WorkersLost`.
        """
        self.recipe = recipe
        self.backend = backend
        batch, train, is_compiled = recipe.batch, recipe.train, recipe.compile.enabled
        length, checkpointing = recipe.corpus.sequence_length, train.activation_checkpointing
        reduce_dtype = DTYPES[recipe.parallel.reduce_dtype]
        self._head_options = (batch.loss_chunk_tokens, backend, reduce_dtype, recipe.model.vocab_size)
        is_by_layer = recipe.parallel.zero_stage == 3
        make_bucket = make_sharded_bucket if is_by_layer else backend.make_bucket
        with torch.device("meta") if is_by_layer else backend.device:
            self.model = Transformer(recipe.model, length, backend, checkpointing, reduce_dtype)
        with backend.host:
            if is_by_layer:
                make_without_memory(self.model, backend.device)
            else:
                self._place_zeros()
            shardings = self.model.shardings()
            num_blocks = choose_num_blocks(batch.num_micro_batches, backend.mesh.data_parallel_size)
            self.buckets = make_buckets(dict(self.model.named_parameters()), shardings, num_blocks, make_bucket)
            is_sharded = recipe.parallel.zero_stage > 0
            self.optimizer = AdamW(self.buckets, recipe.optimizer, backend, is_compiled, is_sharded)
            self._cast_buckets()
            if is_by_layer:
                self.optimizer.update_weights()
            self._sums = [self._make_sum(bucket.size) for bucket in self.buckets]
            self._losses = WorkersSum(backend.make_sum(1, in_tree=True), self._reduce_whole, backend.mesh.takes_turns)
        self.state = ShardedState(self.buckets, shardings, self.optimizer, backend)
        if draws_weights:
            shapes = {name: shardings[name].full_shape(each.shape) for name, each in self.model.named_parameters()}
            with self.state.writing() as held:
                draw_weights(held, shapes, recipe.model, train.seed)
        self._parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters.values()]
        self._layers: LayerByLayer | None = None
        passes: Iterable[Callable[..., Tensor]] = (self._micro_loss, self._micro_losses, self._micro_health)
        if is_by_layer:
            self._layers = LayerByLayer(self.model, self.buckets, backend, self._autocast, is_compiled)
        else:
            passes = map(self._after_layers, passes)
        # The context of autocast stays outside of a compiled function: AOTAutograd does not cache a graph that enters
        # it, and would trace it again at each start.
        self._run_loss, self._run_losses, self._run_health = map(backend.compile, passes) if is_compiled else passes
        self._last_sum: Callable[[], None] | None = None
        """Ends the addition of a gradient that was started last."""
        self._own_norms: list[Tensor] = []
        self._own_losses: list[Tensor] = []
        self.gradient_seconds = 0.0
        """Seconds of the last step until this rank's gradient was computed, without sums that wait for other ranks, or
        until the host had asked for it where the device computes asynchronously."""

    @naming_lost_workers(is_every_error=False)
    def train_step(self, step: int, micro_batches: Iterable[MicroBatch], skipped_steps: int = 0) -> StepResult:
        """Run step number `step` (from 0) with this rank's share of the global batch: micro-batches on the host.

        `skipped_steps` is the number of earlier steps that were not applied. Raises `WorkersLost`.
        """
        started = time.perf_counter()
        self._forget_step()
        for micro_batch in micro_batches:
            self._add_gradients(micro_batch)
            self.backend.end_graph()
        self.gradient_seconds += time.perf_counter() - started - (self._layers.waited_seconds if self._layers else 0.0)
        count = self.recipe.batch.num_micro_batches
        loss_1 = self._losses.result() / count
        scalars_11 = self.backend.place(step_scalars(self.recipe.optimizer, step, skipped_steps))
        gradients_S = [total.result() for total in self._sums]
        self.state.hold_updates()
        norm_1, is_applied_1 = self.optimizer.step(gradients_S, count, scalars_11)
        del gradients_S  # on a lazy device a tensor that is alive when the graph ends is one of its outputs
        self.backend.end_graph()
        return StepResult(loss_1, norm_1, is_applied_1)

    def largest_loss(self) -> float:
        """Wait for the largest micro-batch loss of the last step on this rank, in nats per token.

        It is NaN where a loss is NaN, and on a device that keeps no losses (`Backend.keep`).
        """
        return float(torch.cat(self._own_losses).max()) if self._own_losses else math.nan

    @naming_lost_workers(is_every_error=False)
    def compute_again(self, micro_batches: Iterable[MicroBatch]) -> Recomputation | None:
        """Compute this rank's gradient of the last step again, from the same micro-batches, and update nothing.

        None on a device that keeps nothing of a step (`Backend.keep`). Only where the step was not applied. All workers
        call it.
        """
        if not self._own_norms:
            return None
        was_finite = _are_finite(self._own_norms)
        self._forget_step()
        for micro_batch in micro_batches:
            self._add_gradients(micro_batch)
        for total in (self._losses, *self._sums):
            total.result()
        return Recomputation(was_finite, _are_finite(self._own_norms))

    @naming_lost_workers(is_every_error=False)
    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss of each target of the micro-batches that the model replicas evaluate: this rank's own, and
        one of each other rank of the data axis.

        The result is float32 [ranks * B, S] in nats, in the order of the ranks, and the same on all workers. It is on
        the device, which may still be computing it: read it with `Backend.to_host`. No rank waits longer than for one
        forward pass. All workers call this equally often. Raises `WorkersLost`.
        """
        gathered = self.backend.all_gather(self._run(self._run_losses, micro_batch), "data")
        self.backend.end_graph()  # nothing else of the pass is alive, which a lazy device would return, too
        return gathered

    def measure_health(
        self, step: int, skipped_steps: int, is_applied: bool, micro_batches: Iterable[MicroBatch]
    ) -> Health:
        """Wait for the health of the model after step number `step`, which was the last one, and change nothing.

        The arguments are those of its `train_step` and its outcome. Activations are those of the micro-batches by the
        weights after the step. It costs a forward pass over the micro-batches, and a pass over weights and moments. All
        workers call this together. Raises `WorkersLost`.
        """
        to_host = self.backend.to_host
        squares_3K = to_host(self.measure_squares(step, skipped_steps)) if is_applied else None
        numbers_R2 = [to_host(self.measure_activations(each)) for each in micro_batches]
        groups = name_groups(self.buckets, self.recipe.model.num_hidden_layers)
        return Health.of(squares_3K, groups, self.recipe.batch.num_micro_batches, numbers_R2)

    @naming_lost_workers(is_every_error=False)
    @torch.no_grad()
    def measure_activations(self, micro_batch: MicroBatch) -> Tensor:
        """Return the mean square of the activations after the last layer, and the largest logit, for the micro-batch of
        each rank of the data axis: [ranks, 2] on the device, the same on all workers.

        It costs one forward pass. All workers call this equally often. Raises `WorkersLost`.
        """
        gathered = self.backend.all_gather(self._run(self._run_health, micro_batch), "data")
        self.backend.end_graph()
        return gathered

    @naming_lost_workers(is_every_error=False)
    def measure_squares(self, step: int, skipped_steps: int) -> Tensor:
        """Return `AdamW.measure_squares` of step number `step`, which was the last one and was applied: [3, K] on the
        device. The arguments are those of its `train_step`. All workers call this. Raises `WorkersLost`.
        """
        scalars_11 = self.backend.place(step_scalars(self.recipe.optimizer, step, skipped_steps))
        squares_3K = self.optimizer.measure_squares(scalars_11)
        self.backend.end_graph()
        return squares_3K

    @torch.no_grad()
    def _place_zeros(self) -> None:
        """Place zeros, so that a graph of a lazy device depends neither on unwritten memory nor on who writes it."""
        for parameter in self.model.parameters():
            parameter.copy_(self.backend.place(torch.zeros(parameter.shape)))

    def _cast_buckets(self) -> None:
        """Store the model's weights in the types that it computes with.

        A weight that is only multiplied with is rounded to `train.dtype` once an update, where autocast would round it
        at each use: without one pass over the weights and one over their gradients for each micro-batch. The bits are
        autocast's where nothing is compiled and the language-model head is not sharded; otherwise gradients of a weight
        that is used several times are rounded once more.
        """
        train, only_multiplied = self.recipe.train, self.model.linear_weights()
        for bucket in self.buckets:
            is_rounded = self.backend.rounds_weights and bucket.parameters.keys() <= only_multiplied
            bucket.cast(DTYPES[train.dtype if is_rounded else train.param_dtype])

    def _forget_step(self) -> None:
        """Free what the last step kept: the next one needs the memory."""
        self._own_norms.clear()
        self._own_losses.clear()
        self.gradient_seconds, self._last_sum = 0.0, None
        if self._layers:
            self._layers.forget()

    def _add_gradients(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch's loss and gradients to the step's sums. Afterwards nothing else of the pass is alive."""
        if self._layers:
            loss = self._layers.add_gradients(self._send(micro_batch), self._run_loss, self._add_gradient)
        else:
            loss = self._run(self._run_loss, micro_batch)
            gradients = deque(torch.autograd.grad(loss, self._parameters))
            for number, bucket in enumerate(self.buckets):  # frees a bucket's gradients as it adds them
                self._add_gradient(number, bucket.flatten(gradients.popleft() for _ in bucket.parameters))
        loss_1 = loss.detach().reshape(1)
        self._own_losses += [kept_1.clone() for kept_1 in self.backend.keep(loss_1)]  # the sum may overwrite loss_1
        self._end_sum()
        self._last_sum = self._losses.start_to_add(loss_1)
        self._end_sum()

    def _add_gradient(self, number: int, gradient_P: Tensor) -> None:
        """Start to add a bucket's gradient to its sum, which ends while the next bucket's is computed."""
        self._own_norms += self.backend.keep(torch.linalg.vector_norm(gradient_P))
        self._end_sum()
        self._last_sum = self._sums[number].start_to_add(gradient_P)

    def _end_sum(self) -> None:
        if not self._last_sum:
            return
        started = time.perf_counter()
        self._last_sum()
        self._last_sum = None
        if self.backend.mesh.takes_turns:  # and so has waited for other ranks
            self.gradient_seconds -= time.perf_counter() - started

    def _make_sum(self, size: int) -> WorkersSum:
        """Make the sum of the gradients of a bucket [size], of which this rank gets its shard."""
        mesh, in_tree = self.backend.mesh, self.recipe.train.reduction == "exact"
        held = size // mesh.data_parallel_size if mesh.takes_turns else size
        reduce = self._reduce_shard if self.optimizer.is_sharded else self._reduce_whole
        return WorkersSum(self.backend.make_sum(held, in_tree), reduce, mesh.takes_turns)

    def _reduce_whole(self, x: Tensor) -> Callable[[], Tensor]:
        return partial(self.backend.all_reduce, x, "data")

    def _reduce_shard(self, x: Tensor) -> Callable[[], Tensor]:
        return self.backend.start_reduce_scatter(x, "data")

    def _run(self, function: Callable[..., Tensor], micro_batch: MicroBatch) -> Tensor:
        sent = self._send(micro_batch)
        if self._layers:
            return self._layers.run(sent, function)
        with self._autocast():
            return function(*sent)

    def _send(self, micro_batch: MicroBatch) -> MicroBatch:
        tokens_BS, positions_BS = micro_batch
        return MicroBatch(
            self.backend.send(tokens_BS), None if positions_BS is None else self.backend.send(positions_BS)
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.backend.autocast(self.recipe.train.dtype)

    def _after_layers(self, tail: Tail) -> Callable[..., Tensor]:
        """Return the pass of the whole model that ends in `tail`."""

        @wraps(tail)
        def run(tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
            return tail(self.model.model.run_layers(tokens_BS[:, :-1], positions_BS), tokens_BS)

        return run

    def _micro_loss(self, residual_BSD: Tensor, tokens_BS: Tensor) -> Tensor:
        hidden_BSD, head_VD = self.model.model.norm(residual_BSD), self.model.lm_head.weight
        return next_token_loss(hidden_BSD, head_VD, tokens_BS[:, 1:], *self._head_options, self.recipe.train.z_loss)

    def _micro_losses(self, residual_BSD: Tensor, tokens_BS: Tensor) -> Tensor:
        hidden_BSD, head_VD = self.model.model.norm(residual_BSD), self.model.lm_head.weight
        return next_token_losses(hidden_BSD, head_VD, tokens_BS[:, 1:], *self._head_options)

    def _micro_health(self, residual_BSD: Tensor, tokens_BS: Tensor) -> Tensor:
        hidden_BSD, head_VD = self.model.model.norm(residual_BSD), self.model.lm_head.weight
        return measure_activations(residual_BSD, hidden_BSD, head_VD, *self._head_options)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
