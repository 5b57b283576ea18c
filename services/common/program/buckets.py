"""Buckets: all parameters of a model in a few flat tensors, over which reduction, clipping and AdamW run.

Shape suffixes: P elements of a bucket with its padding, S elements of this rank's shard of a bucket, N blocks of a
bucket, B elements of a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from services.common.program.mesh import Axis
from services.common.program.sharding import Sharding

MAX_BLOCKS = 64
VECTORS = "vectors"
LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")
ROW = 16_384
"""Elements of a block that one thread sums by itself, so that the bits do not depend on the number of threads."""


class Bucket:
    """Parameters of one kind, which become views of one flat tensor [P] of whole blocks.

    A block is the unit of one sum of squares and of one AdamW update. The number of blocks does not depend on the
    number of ranks that share the bucket, so neither do the bits of the gradient norm.
    """

    is_sharded = False
    """Whether this rank keeps its shard of the weights alone, which `write` then takes."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_blocks: int, sum_axis: Axis | None = None) -> None:
        self.parameters = dict(parameters)
        self.num_blocks = num_blocks
        self.device = next(iter(self.parameters.values())).device
        self.sum_axis = sum_axis
        """Axis along which the ranks hold the same parameters and partial gradients, which have to be summed."""
        self.is_decayed = all(parameter.ndim > 1 for parameter in self.parameters.values())
        """Whether weight decay applies: it applies to matrices."""
        num_elements = sum(parameter.numel() for parameter in self.parameters.values())
        self._padding = -num_elements % num_blocks
        self.size = num_elements + self._padding
        """Number of elements P."""
        self._hold_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights."""
        return next(iter(self.parameters.values())).dtype

    @property
    def weights(self) -> list[Tensor]:
        """Tensors that hold the model's weights."""
        return [self.weights_P]

    def cast(self, dtype: torch.dtype) -> None:
        """Round the model's weights to `dtype`: its parameters become views of a rounded copy.

        Nothing is copied where the weights have that type.
        """
        self._hold(self.weights_P.to(dtype))

    def write(self, flat_P: Tensor) -> None:
        """Overwrite the model's weights with these, rounded to their type."""
        if flat_P is not self.weights_P:
            self.weights_P.copy_(flat_P)

    def shard(self, num_shards: int, index: int) -> Tensor:
        """Return a shard [S] of the weights in float32, before they are cast."""
        return self.weights_P.chunk(num_shards)[index]

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor by parameter name, in the parameters' shapes."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        pieces = flat_P[: sum(sizes)].split(sizes)
        return {
            name: piece.view(parameter.shape)
            for (name, parameter), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield the parameters in elements `start` to `stop` of the bucket: (name, first element within the parameter,
        end within the parameter, first element within the bucket). The padding belongs to no parameter.
        """
        offset = 0
        for name, parameter in self.parameters.items():
            end = offset + parameter.numel()
            if offset < stop and start < end:
                yield name, max(start, offset) - offset, min(stop, end) - offset, max(start, offset)
            offset = end

    def _hold_parameters(self) -> None:
        self._hold(self.flatten(parameter.detach() for parameter in self.parameters.values()))

    def _hold(self, weights_P: Tensor) -> None:
        self.weights_P = weights_P
        for name, view in self.views(weights_P).items():
            self.parameters[name].data = view

    def blocks(self, shard_S: Tensor) -> list[Tensor]:
        """Return views of the blocks [B] in a rank's shard of a flat tensor, or in all of it."""
        return list(shard_S.split(self.size // self.num_blocks))

    def update_units(self, shard_S: Tensor) -> list[Tensor]:
        """Return views of the parts of a shard that AdamW updates one at a time."""
        return self.blocks(shard_S)

    def sums_of_squares(self, shard_S: Tensor) -> Tensor:
        """Return the sum of squares of each block in a shard [N], in one pass over memory."""
        return torch.cat([_sum_of_squares(block_B) for block_B in self.blocks(shard_S)])

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """Copy a tensor for each parameter, in the parameters' order and of any type, into one float32 tensor [P]."""
        flat_P = torch.empty(self.size, dtype=torch.float32, device=self.device)
        for view, tensor in zip(self.views(flat_P).values(), tensors, strict=True):
            view.copy_(tensor)
        flat_P[self.size - self._padding :].zero_()
        return flat_P


class ShardedBucket(Bucket):
    """A bucket of whose weights a rank keeps its shard (ZeRO-3). Its parameters have values while `hold` lends them
    gathered ones; before and after they are zeros without memory.
    """

    is_sharded = True

    @property
    def weights(self) -> list[Tensor]:
        return [self.shard_S]

    def shard(self, num_shards: int, index: int) -> Tensor:
        return torch.zeros(self.size // num_shards)

    def cast(self, dtype: torch.dtype) -> None:
        self._zero_1: Tensor = self._zero_1.to(dtype)
        self.release()

    def write(self, flat_P: Tensor) -> None:
        self.shard_S = flat_P.to(self._zero_1.dtype)

    def hold(self, flat_P: Tensor) -> None:
        """Make the parameters views of the gathered weights."""
        for name, view in self.views(flat_P).items():
            self.parameters[name].data = view

    def release(self) -> None:
        """Make the parameters zeros again; the gathered weights are freed where nothing else refers to them."""
        for parameter in self.parameters.values():
            parameter.data = self._zero_1.expand(parameter.shape)

    def _hold_parameters(self) -> None:
        self._zero_1 = torch.zeros(1, device=self.device)


class SeparateBucket(Bucket):
    """A bucket for a lazy device: its parameters have memory of their own.

    On such a device a view is an output of a graph beside the tensor that it views, so each weight would be there
    twice; and one operation on a whole shard is a smaller graph than one for each block.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        num_blocks: int,
        sum_axis: Axis | None,
        place: Callable[[Tensor], Tensor],
        to_host: Callable[[Tensor], Tensor],
    ) -> None:
        self._place, self._to_host = place, to_host
        super().__init__(parameters, num_blocks, sum_axis)

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters.values()]

    def cast(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters.values():
            if parameter.dtype != dtype:
                parameter.data = self._place(self._to_host(parameter.detach()).to(dtype))
        del self.weights_P

    def update_units(self, shard_S: Tensor) -> list[Tensor]:
        return [shard_S]

    def sums_of_squares(self, shard_S: Tensor) -> Tensor:
        return torch.cat([block_B.square().sum(0, keepdim=True) for block_B in self.blocks(shard_S)])

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        parts = [tensor.flatten() for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self._padding)]).float()

    def write(self, flat_P: Tensor) -> None:
        for name, piece in self.views(flat_P).items():
            self.parameters[name].copy_(piece)

    def _hold_parameters(self) -> None:
        # The optimizer copies its master weights from here, on the host; `cast` then frees this tensor.
        self.weights_P = self.flatten(self._to_host(parameter.detach()) for parameter in self.parameters.values())


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    shardings: Mapping[str, Sharding],
    num_blocks: int,
    make_bucket: Callable[[Mapping[str, nn.Parameter], int, Axis | None], Bucket] = Bucket,
) -> list[Bucket]:
    """Make one bucket for the matrices of each layer, one for each other matrix, and one for all vectors (norms).

    Parameters whose gradients are summed along another axis have buckets of their own.
    """
    groups: dict[tuple[str, Axis | None], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        layer = LAYER.search(name)
        place = VECTORS if parameter.ndim == 1 else name[: layer.end()] if layer else name
        groups.setdefault((place, shardings[name].sum_axis), {})[name] = parameter
    ordered = sorted(groups.items(), key=lambda item: item[0][0] == VECTORS)  # stable: vectors come last
    return [make_bucket(members, num_blocks, sum_axis) for (_, sum_axis), members in ordered]


def choose_num_blocks(num_micro_batches: int, data_parallel_size: int) -> int:
    """Choose the number of blocks of a bucket, which the ranks of the data axis share evenly.

    It follows from the global batch alone, and so is the same for every number of ranks, where there are at most
    MAX_BLOCKS micro-batches, or a power of two of micro-batches (as `exact` sums have) and at most MAX_BLOCKS ranks.
    """
    if num_micro_batches <= MAX_BLOCKS:
        return num_micro_batches
    return data_parallel_size if MAX_BLOCKS % data_parallel_size else MAX_BLOCKS


def _sum_of_squares(x_B: Tensor) -> Tensor:
    """Return the sum of squares [1] over rows of ROW elements, each of which one thread sums."""
    whole = len(x_B) // ROW * ROW
    rows, rest = x_B[:whole].view(-1, ROW), x_B[whole:].view(1, -1)
    norms = torch.cat([torch.linalg.vector_norm(each, dim=1) for each in (rows, rest)])
    return norms.square().sum(0, keepdim=True)
