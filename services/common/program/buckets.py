"""All parameters of a model in a few flat tensors, so that reduction, clipping and AdamW are loops over large ones.

Shape suffixes: P elements of a bucket with its padding, B elements of a block.
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


class Bucket:
    """Parameters of one kind, which become views of one flat tensor [P] of whole blocks.

    A block is what one sum of squares is taken over, and what AdamW updates at once. A bucket has as many blocks for
    any number of workers that share them, so that the bits of the norm do not depend on that.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_blocks: int, sum_axis: Axis | None = None) -> None:
        self.parameters = dict(parameters)
        self.num_blocks = num_blocks
        self.sum_axis = sum_axis
        """Workers along it hold the same parameters, and each of them only a part of the gradient."""
        self.is_decayed = all(parameter.ndim > 1 for parameter in self.parameters.values())
        """Weight decay applies to matrices."""
        num_elements = sum(parameter.numel() for parameter in self.parameters.values())
        self._padding = -num_elements % num_blocks
        self.size = num_elements + self._padding
        """P."""
        self._hold_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights."""
        return next(iter(self.parameters.values())).dtype

    @property
    def weights(self) -> list[Tensor]:
        """The memory of the model's weights."""
        return [self.weights_P]

    def cast(self, dtype: torch.dtype) -> None:
        """Round the model's weights to `dtype`: its parameters become views of a copy. Nothing is copied where they
        have it.
        """
        self._hold(self.weights_P.to(dtype))

    def write(self, flat_P: Tensor) -> None:
        """Make the model's weights these, in their type."""
        if flat_P is not self.weights_P:
            self.weights_P.copy_(flat_P)

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor under their parameters' names, in their shapes, sharing its memory."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        pieces = flat_P[: sum(sizes)].split(sizes)
        return {
            name: piece.view(parameter.shape)
            for (name, parameter), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """The parameters that lie in elements `start` to `stop` of the bucket: (name, first element of the parameter,
        end, its place in the bucket). The padding is none of them.
        """
        begin = 0
        for name, parameter in self.parameters.items():
            end = begin + parameter.numel()
            if begin < stop and start < end:
                yield name, max(start, begin) - begin, min(stop, end) - begin, max(start, begin)
            begin = end

    def _hold_parameters(self) -> None:
        self._hold(self.flatten(parameter.detach() for parameter in self.parameters.values()))

    def _hold(self, weights_P: Tensor) -> None:
        self.weights_P = weights_P
        for name, view in self.views(weights_P).items():
            self.parameters[name].data = view

    def blocks(self, share_S: Tensor) -> list[Tensor]:
        """The blocks [B] of a flat tensor or of a worker's share of one, sharing its memory."""
        return list(share_S.split(self.size // self.num_blocks))

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """One float32 tensor [P] from a tensor for each parameter, in their order; one pass for any types."""
        device = next(iter(self.parameters.values())).device
        flat_P = torch.empty(self.size, dtype=torch.float32, device=device)
        for view, tensor in zip(self.views(flat_P).values(), tensors, strict=True):
            view.copy_(tensor)
        flat_P[self.size - self._padding :].zero_()
        return flat_P


class SeparateBucket(Bucket):
    """A bucket whose parameters have memory of their own, on a device that computes at the end of a graph.

    There a view is an output of a graph beside the tensor that it is a part of, so each weight would be there twice.
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

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        parts = [tensor.flatten() for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self._padding)]).float()

    def write(self, flat_P: Tensor) -> None:
        for name, piece in self.views(flat_P).items():
            self.parameters[name].copy_(piece)

    def _hold_parameters(self) -> None:
        # On the host, for the optimizer to begin with.
        self.weights_P = self.flatten(self._to_host(parameter.detach()) for parameter in self.parameters.values())


def make_buckets(
    parameters: Mapping[str, nn.Parameter],
    shardings: Mapping[str, Sharding],
    num_blocks: int,
    new_bucket: Callable[..., Bucket] = Bucket,
) -> list[Bucket]:
    """A bucket for the matrices of each layer, one for each other matrix, and one for all vectors (norm weights).

    Matrices that other workers hold copies of have buckets of their own.
    """
    groups: dict[tuple[str, Axis | None], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        layer = LAYER.search(name)
        place = VECTORS if parameter.ndim == 1 else name[: layer.end()] if layer else name
        groups.setdefault((place, shardings[name].sum_axis), {})[name] = parameter
    ordered = sorted(groups.items(), key=lambda item: item[0][0] == VECTORS)  # stable: vectors come last
    return [new_bucket(members, num_blocks, sum_axis) for (_, sum_axis), members in ordered]


def choose_num_blocks(num_micro_batches: int, data_parallel_size: int) -> int:
    """Blocks of a bucket, which the workers of the data axis share evenly.

    They follow from the batch alone wherever they can: for every number of workers that its micro-batches can be shared
    by, or of a power of two of micro-batches, which `exact` sums have, every number up to MAX_BLOCKS.
    """
    if num_micro_batches <= MAX_BLOCKS:
        return num_micro_batches
    return data_parallel_size if MAX_BLOCKS % data_parallel_size else MAX_BLOCKS
