"""ZeRO-3 (arXiv 1910.02054): passes of a model whose ranks keep shards of its matrices, layer by layer.

A rank gathers the matrices of one unit of the model at a time, and those of the next unit meanwhile: in the forward
pass from the embedding through the layers to the head, and then back. Its memory has two layers, however many there
are. A unit is computed for itself, by a graph that is the same for all layers, and its gradients leave the rank before
those of the next unit are there.

Units are numbered: 0 is the embedding, then come the layers, and the last is the final norm with the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from services.common.program.backends.backend import Backend
from services.common.program.buckets import Bucket, ShardedBucket
from services.common.program.mesh import Axis
from services.common.program.micro_batch import MicroBatch
from services.common.program.transformer import Transformer

Tail = Callable[[Tensor, Tensor], Tensor]
"""A function of the activations after the last layer and of a micro-batch's tokens, such as the loss."""
Positions = tuple[Tensor, Tensor, Tensor | None]
AddGradient = Callable[[int, Tensor], None]
"""Takes the number of a bucket and its gradient [P] in float32."""


def make_sharded_bucket(parameters: Mapping[str, nn.Parameter], num_blocks: int, sum_axis: Axis | None) -> Bucket:
    """Make a bucket for matrices, which are sharded, or for vectors: those are few, and every rank keeps them."""
    is_vector = all(parameter.ndim == 1 for parameter in parameters.values())
    return (Bucket if is_vector else ShardedBucket)(parameters, num_blocks, sum_axis)


def make_without_memory(model: Transformer, device: torch.device) -> None:
    """Move a model from the meta device, where it was made, to its device, with parameters that are zeros without
    memory: all of them together may be larger than the device.
    """
    zero_1 = torch.zeros(1, device=device)
    made = {parameter: nn.Parameter(zero_1.expand(parameter.shape)) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[parameter])  # a tied one in both modules
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


class LayerByLayer:
    """The passes of a model whose matrices are in sharded buckets. All ranks of the data axis call them together."""

    def __init__(
        self,
        model: Transformer,
        buckets: Sequence[Bucket],
        backend: Backend,
        autocast: Callable[[], AbstractContextManager[Any]],
        is_compiled: bool,
    ) -> None:
        """`autocast` makes the context of a forward pass."""
        self._decoder, self._buckets, self._backend, self._autocast = model.model, buckets, backend, autocast
        self._run_layer = backend.compile(self._decoder.run_layer) if is_compiled else self._decoder.run_layer
        head = [*self._decoder.norm.parameters(), model.lm_head.weight]
        units = [self._decoder.embed_tokens, *self._decoder.layers]
        self._parameters = [*(list(unit.parameters()) for unit in units), head]
        self._sharded = {number: each for number, each in enumerate(buckets) if isinstance(each, ShardedBucket)}
        owners = {id(each): number for number, bucket in enumerate(buckets) for each in bucket.parameters.values()}
        needed = [{owners[id(parameter)] for parameter in parameters} for parameters in self._parameters]
        self._gathered = [sorted(numbers & self._sharded.keys()) for numbers in needed]
        """Numbers of the buckets that each unit needs whole."""
        self._completed = [sorted(own.difference(*needed[:unit])) for unit, own in enumerate(needed)]
        """Numbers of the buckets whose gradients are complete after the backward pass of each unit."""
        self._flats: dict[int, Tensor] = {}
        """The gathered weights by the number of their bucket."""
        self._gradients: dict[int, Tensor] = {}
        """Gradients of buckets that are not complete, by their parameters' ids."""
        self.waited_seconds = 0.0
        """Seconds in which passes have waited for weights of other ranks."""

    @torch.no_grad()
    def run(self, micro_batch: MicroBatch, tail: Tail) -> Tensor:
        """Return the tail's result, without gradients."""
        positions = self._decoder.read_positions(micro_batch.tokens.shape[1] - 1, micro_batch.positions)
        x: Tensor | None = None
        last = len(self._parameters) - 1
        with self._autocast(), closing(self._visit(range(last + 1))) as visits:
            for unit in islice(visits, last):
                x = self._forward(unit, x, micro_batch.tokens, positions)
            next(visits)
            assert x is not None
            return tail(x, micro_batch.tokens)

    def add_gradients(self, micro_batch: MicroBatch, tail: Tail, add: AddGradient) -> Tensor:
        """Return the tail's result, a loss, and give the gradient of each bucket to `add`, the last layer's first."""
        last, tokens_BS = len(self._parameters) - 1, micro_batch.tokens
        positions = self._decoder.read_positions(tokens_BS.shape[1] - 1, micro_batch.positions)
        calls: list[tuple[Tensor | None, Tensor]] = []
        with closing(self._visit([*range(last), last, *reversed(range(1, last))])) as visits:
            for unit in islice(visits, last):
                given = calls[-1][1].detach().requires_grad_() if calls else None
                with self._autocast(), saved_tensors_hooks(self._pack, self._unpack):
                    calls.append((given, self._forward(unit, given, tokens_BS, positions)))
            next(visits)
            given = calls[-1][1].detach().requires_grad_()
            with self._autocast():
                loss = tail(given, tokens_BS)
            gradient, given = self._backward(last, given, loss, None, add), None
            for unit in visits:
                gradient = self._backward(unit, *calls.pop(), gradient, add)
        self._backward(0, *calls.pop(), gradient, add)  # the gradient of a look-up needs no weights
        return loss.detach()

    def forget(self) -> None:
        """Forget the last step, also one that an error has ended."""
        self._gradients.clear()
        self.waited_seconds = 0.0

    def _forward(self, unit: int, x: Tensor | None, tokens_BS: Tensor, positions: Positions) -> Tensor:
        if x is None:
            return self._decoder.embed(tokens_BS[:, :-1])
        return self._run_layer(self._decoder.layers[unit - 1], x, *positions)

    def _backward(
        self,
        unit: int,
        given: Tensor | None,
        result: Tensor,
        gradient: Tensor | None,
        add: AddGradient,
    ) -> Tensor | None:
        """Return the gradient of what the unit was given, and add those of buckets that are complete with it."""
        parameters, held = self._parameters[unit], self._gradients
        found = torch.autograd.grad(result, [*parameters, *([] if given is None else [given])], gradient)
        for parameter, own in zip(parameters, found, strict=False):
            held[id(parameter)] = held[id(parameter)] + own if id(parameter) in held else own
        passed_on = None if given is None else found[-1]
        del found, own
        for number in self._completed[unit]:
            bucket = self._buckets[number]
            add(number, bucket.flatten(held.pop(id(each)) for each in bucket.parameters.values()))
        return passed_on

    def _visit(self, order: Sequence[int]) -> Generator[int]:
        """Yield units with their weights gathered, while those of the next unit are on their way."""
        coming = self._start_to_gather(order[0])
        for unit, following in zip(order, [*order[1:], None], strict=True):
            started = time.perf_counter()
            self._flats = {number: finish() for number, finish in coming.items()}
            self.waited_seconds += time.perf_counter() - started
            for number in self._flats:
                self._sharded[number].hold(self._flats[number])
            coming = {} if following is None else self._start_to_gather(following)
            try:
                yield unit
            finally:
                for number in self._flats:
                    self._sharded[number].release()
                self._flats = {}

    def _start_to_gather(self, unit: int) -> dict[int, Callable[[], Tensor]]:
        start = self._backend.start_all_gather
        return {number: start(self._sharded[number].shard_S, "data") for number in self._gathered[unit]}

    def _pack(self, x: Tensor) -> Tensor | Callable[[], Tensor]:
        """What autograd keeps for the backward pass: a view of gathered weights as one of those gathered then."""
        for number, flat_P in self._flats.items():
            if flat_P.untyped_storage()._cdata == x.untyped_storage()._cdata:
                view = x.size(), x.stride(), x.storage_offset()
                return lambda: self._flats[number].as_strided(*view)
        return x

    @staticmethod
    def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()
