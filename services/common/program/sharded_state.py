"""The state of a run as one rank holds it, in slices that every other number of ranks can read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from services.common.program.backends.backend import Backend
from services.common.program.buckets import Bucket
from services.common.program.mesh import Axis
from services.common.program.optimizer import AdamW
from services.common.program.sharding import Sharding
from services.common.program.state import StateKind, StateSlice


class ShardedState:
    """This rank's shard of the state: float32 master weights, and AdamW's two moments of each.

    A rank holds its tensor-parallel shard of each parameter, and of that its ZeRO-1 shard where the optimizer is
    sharded. A rank *owns* what it writes into a checkpoint: together the ranks own each element of the state once.
    """

    def __init__(
        self, buckets: Sequence[Bucket], shardings: Mapping[str, Sharding], optimizer: AdamW, backend: Backend
    ) -> None:
        self._buckets, self._shardings = buckets, shardings
        self._optimizer, self._backend = optimizer, backend
        self._snapshots = backend.make_snapshots()

    def read(self) -> dict[StateSlice, Tensor]:
        """Return everything that this rank holds, as flat tensors on the host: views where the device is the host."""
        return self._slice(self._to_host(), is_owned=False)

    @contextmanager
    def writing(self) -> Iterator[dict[StateSlice, Tensor]]:
        """Give the tensors of `read` to write to; afterwards the state and the model's weights are what was written.

        All workers enter and leave this context together. Nothing is defined about the state after an error.
        """
        on_host = self._to_host()
        yield self._slice(on_host, is_owned=False)
        self._snapshots.hold_updates()
        with torch.no_grad():
            for kind, tensors in self._optimizer.state().items():
                for held, written in zip(tensors, on_host.pop(kind), strict=True):
                    if written is not held:
                        held.copy_(self._backend.place(written))
            self._optimizer.update_weights()
        self._backend.end_graph()

    def start_snapshot(self) -> Callable[[], dict[StateSlice, Tensor]]:
        """Start to copy what this rank owns to the host, and return a function that waits for the copy and returns it,
        in any thread.

        The copy lasts until the next snapshot starts, before which the caller has to wait for this one.
        """
        state = {kind: list(map(self._backend.sliceable, held)) for kind, held in self._optimizer.state().items()}
        return self._snapshots.start(self._slice(state, is_owned=True))

    def find_owners(self) -> dict[str, np.ndarray]:
        """Return the slices of each parameter that the ranks own, by the parameter's name: int64 [slices, 7] of
        `StateSlice.row` and the rank. Each kind of state has these slices.

        They follow from the mesh, so that no rank is asked. Their number grows with the number of ranks.
        """
        mesh, found = self._backend.mesh, dict[str, list[np.ndarray]]()
        for tensor_index in range(mesh.tensor_parallel_size):
            first_of_axis = replace(mesh, rank=tensor_index)
            for bucket in self._buckets:
                if bucket.sum_axis is not None and first_of_axis.index(bucket.sum_axis) > 0:
                    continue
                length = bucket.size // mesh.data_parallel_size
                for name, _, stop, offset in bucket.runs(0, bucket.size):
                    box = self._shardings[name].of(first_of_axis).box(bucket.parameters[name].shape)
                    num_elements = min(stop, _num_elements(box))  # rows of padding are the last of a shard
                    if not num_elements:
                        continue
                    data_indices = np.arange(offset // length, (offset + num_elements - 1) // length + 1)
                    rows = np.tile((*StateSlice("weight", name, box, 0, num_elements).row, 0), (len(data_indices), 1))
                    rows[:, -3] = np.maximum(data_indices * length - offset, 0)
                    rows[:, -2] = np.minimum((data_indices + 1) * length - offset, num_elements)
                    rows[:, -1] = data_indices * mesh.tensor_parallel_size + tensor_index
                    found.setdefault(name, []).append(rows)
        return {name: np.concatenate(rows) for name, rows in found.items()}

    def hold_updates(self) -> None:
        """Let later updates change the state only after the last snapshot's copy is made. The host does not wait."""
        self._snapshots.hold_updates()

    @torch.no_grad()
    def is_finite(self) -> Tensor:
        """Return whether all weights of the model are finite, [1] on the device. A weight that is not finite stays so,
        whatever the gradients are. All workers call it.
        """
        extremes = [extreme for each in self._weights() for extreme in (each.min(), each.max())]
        is_bad_1 = torch.stack(extremes).isfinite().all().logical_not().float().reshape(1)
        axes: tuple[Axis, ...] = ("tensor", "data") if any(each.is_sharded for each in self._buckets) else ("tensor",)
        for axis in axes:
            is_bad_1 = self._backend.all_reduce(is_bad_1, axis, "max")
        is_finite_1 = is_bad_1 == 0
        self._backend.end_graph()
        return is_finite_1

    def digests(self) -> dict[str, int]:
        """Return a 63-bit hash of each part of the state that this rank holds and others, too, by a name with the first
        of them. Hashes of one name are equal as long as the bits are.
        """
        mesh, is_sharded, parts = self._backend.mesh, self._optimizer.is_sharded, defaultdict[str, list[Tensor]](list)
        key_value_first = mesh.group("key_value")[0] % mesh.tensor_parallel_size
        firsts = {None: mesh.index("tensor"), "tensor": 0, "key_value": key_value_first}
        for number, bucket in enumerate(self._buckets):
            held = {"weights": (bucket.weights, bucket.is_sharded)}
            for kind, tensors in self._optimizer.state().items():
                if kind != "weight" or is_sharded or bucket.dtype != torch.float32:  # otherwise they are one memory
                    held[f"optimizer's {kind}"] = [tensors[number]], is_sharded
            copies = mesh.size(bucket.sum_axis) if bucket.sum_axis else 1
            for name, (tensors, is_shard) in held.items():
                if copies * (1 if is_shard else mesh.data_parallel_size) > 1:
                    first = firsts[bucket.sum_axis] + is_shard * mesh.index("data") * mesh.tensor_parallel_size
                    parts[f"{name} along {bucket.sum_axis or 'data'} from rank {first}"] += tensors
        return {name: _digest(map(self._backend.to_host, tensors)) for name, tensors in parts.items()}

    def _to_host(self) -> dict[StateKind, list[Tensor]]:
        return {kind: list(map(self._backend.to_host, held)) for kind, held in self._optimizer.state().items()}

    def _slice(self, state: Mapping[StateKind, Sequence[Tensor]], is_owned: bool) -> dict[StateSlice, Tensor]:
        """Cut a tensor [S] of each bucket and kind into views of the slices that this rank holds or owns."""
        mesh = self._backend.mesh
        slices: dict[StateSlice, Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            is_copy = bucket.sum_axis is not None and mesh.index(bucket.sum_axis) > 0
            if is_owned and is_copy:
                continue
            length = bucket.size // mesh.data_parallel_size
            first = mesh.index("data") * length
            offset = first if self._optimizer.is_sharded else 0  # element of the bucket where the held tensor starts
            num_held = len(self._optimizer.exp_avg_S[number])
            start, stop = (first, first + length) if is_owned else (offset, offset + num_held)
            for name, run_start, run_stop, place in bucket.runs(start, stop):
                box = self._shardings[name].box(bucket.parameters[name].shape)
                end = min(run_stop, _num_elements(box))
                if run_start >= end:  # only padding, which no full tensor has
                    continue
                for kind, held in state.items():
                    elements = held[number][place - offset :][: end - run_start]
                    slices[StateSlice(kind, name, box, run_start, end)] = elements
        return slices

    def _weights(self) -> list[Tensor]:
        return [weights for bucket in self._buckets for weights in bucket.weights]


def _num_elements(box: Iterable[tuple[int, int]]) -> int:
    return math.prod(end - first for first, end in box)


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.intdigest() >> 1
