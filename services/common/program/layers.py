"""Layers whose weights are split over the workers of the tensor axis, and what moves activations between them.

Between blocks each of the t workers holds a slice of the sequence, [B, S / t, D], which norms and residuals need; a
block gathers the sequence, computes with its part of the weights, and scatters the sum of the parts (Megatron-LM, arXiv
1909.08053 and 2205.05198). With one worker every layer is the plain one, and nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.program.attention import attend
from services.common.program.backends.protocol import Collectives
from services.common.program.mesh import Axis, Mesh

Heads = Literal["query", "key_value"]
"""What lies along the dimension that is split: a worker's query heads look at its key-value heads."""
SEQUENCE = 1  # its dimension in an activation


class OneWorker:
    """The collectives of a model that is not split: see `Collectives`."""

    mesh = Mesh(0, data_parallel_size=1)
    is_lazy = False

    def index(self, axis: Axis) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
        return x

    def fence(self, *tensors: Tensor, after: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def attend(self, q_BHSN: Tensor, k_BKSN: Tensor, v_BKSN: Tensor, mask_B1SS: Tensor | None) -> Tensor:
        return attend(q_BHSN, k_BKSN, v_BKSN, mask_B1SS)


@dataclass(frozen=True)
class Layout:
    """Which part of a parameter a worker of the tensor axis has."""

    dim: int | None = None
    """Along which it is split; None: every worker has all of it."""
    num_parts: int = 1
    part: int = 0
    sum_axis: Axis | None = None
    """Workers along it have the same part, and each of them only a part of its gradient."""

    def take(self, full: Tensor) -> Tensor:
        """This worker's part of the full tensor."""
        return full if self.dim is None else full.chunk(self.num_parts, self.dim)[self.part]

    def box(self, shape: torch.Size) -> tuple[tuple[int, int], ...]:
        """Begin and end along each dimension of the full tensor, of a part that has this shape."""
        firsts = (self.part * length if dim == self.dim else 0 for dim, length in enumerate(shape))
        return tuple((first, first + length) for first, length in zip(firsts, shape, strict=True))

    def full_shape(self, shape: torch.Size) -> torch.Size:
        """Shape of the full tensor of which a part has this one."""
        return torch.Size(length * (self.num_parts if dim == self.dim else 1) for dim, length in enumerate(shape))


def split(mesh: Mesh, dim: int, heads: Heads | None = None) -> Layout:
    """A part for each worker of the tensor axis, or for each group of those that hold copies of key-value heads."""
    num_copies = mesh.key_value_copies if heads == "key_value" else 1
    sum_axis: Axis | None = "key_value" if num_copies > 1 else None
    if mesh.tensor_parallel_size == num_copies:
        return Layout(sum_axis=sum_axis)
    part = {None: mesh.index("tensor"), "query": mesh.query_part, "key_value": mesh.key_value_part}[heads]
    return Layout(dim, mesh.tensor_parallel_size // num_copies, part, sum_axis)


class Linear(nn.Module):
    """x W^T without a bias, of which this worker has a part of W [out, in], split along `dim`."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, dim: int, heads: Heads | None = None) -> None:
        super().__init__()
        self.layout = split(mesh, dim, heads)
        shape = [out_features, in_features]
        shape[dim] //= self.layout.num_parts
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x_BSI: Tensor) -> Tensor:
        return F.linear(x_BSI, self.weight)


class ColumnParallelLinear(Linear):
    """Split by outputs, the columns of W^T: each worker computes some of them, of the whole sequence."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, heads: Heads | None = None) -> None:
        super().__init__(in_features, out_features, mesh, dim=0, heads=heads)


class RowParallelLinear(Linear):
    """Split by inputs, the rows of W^T: the workers' results are to be summed, which `reduce_scatter_sequence` does."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, heads: Heads | None = None) -> None:
        super().__init__(in_features, out_features, mesh, dim=1, heads=heads)


class VocabularyParallelEmbedding(nn.Module):
    """A table [V, D] of which each worker has some rows. The workers' results are to be summed."""

    def __init__(self, vocab_size: int, hidden_size: int, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self.layout = split(collectives.mesh, dim=0)
        self.weight = nn.Parameter(torch.empty(vocab_size // self.layout.num_parts, hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.layout.num_parts == 1:
            return F.embedding(tokens_BS, self.weight)
        num_rows = self.weight.shape[0]
        rows_BS = tokens_BS - self._collectives.index("tensor") * num_rows
        is_here_BS = (rows_BS >= 0) & (rows_BS < num_rows)
        found_BSD = F.embedding(torch.where(is_here_BS, rows_BS, torch.zeros_like(rows_BS)), self.weight)
        return found_BSD * is_here_BS[..., None].to(found_BSD.dtype)


class RMSNorm(nn.Module):
    """arXiv 1910.07467. Statistics in float32 whatever the input's type. A worker norms its slice of the sequence."""

    def __init__(self, size: int, epsilon: float, mesh: Mesh) -> None:
        super().__init__()
        self.layout = Layout(sum_axis="tensor" if mesh.tensor_parallel_size > 1 else None)
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x_BSD: Tensor) -> Tensor:
        x32_BSD = x_BSD.to(torch.float32)
        variance_BS1 = x32_BSD.pow(2).mean(-1, keepdim=True)
        return self.weight * (x32_BSD * torch.rsqrt(variance_BS1 + self.epsilon)).to(x_BSD.dtype)


def gather_sequence(x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
    """[B, S / t, D] -> [B, S, D]. Gradients of the workers, each for its use of the whole, are summed and scattered: in
    `sum_dtype`, or in their own type where that is wider.
    """
    if collectives.mesh.tensor_parallel_size == 1:
        return x_BSD
    gathered_BSD: Tensor = _GatherSequence.apply(x_BSD, collectives, sum_dtype)  # type: ignore[no-untyped-call]
    return gathered_BSD


def reduce_scatter_sequence(x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
    """The workers' [B, S, D] -> this worker's slice [B, S / t, D] of their sum, in their type. It is summed in
    `sum_dtype`, or in their type where that is wider.
    """
    if collectives.mesh.tensor_parallel_size == 1:
        return x_BSD
    summed_BSD: Tensor = _ReduceScatterSequence.apply(x_BSD, collectives, sum_dtype)  # type: ignore[no-untyped-call]
    return summed_BSD


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
        ctx.collectives, ctx.sum_dtype = collectives, sum_dtype
        return collectives.all_gather(x_BSD, "tensor", SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient_BSD: Tensor) -> tuple[Tensor, None, None]:
        return _sum_and_scatter(gradient_BSD, ctx.collectives, ctx.sum_dtype), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
        ctx.collectives = collectives
        return _sum_and_scatter(x_BSD, collectives, sum_dtype)

    @staticmethod
    def backward(ctx: Any, gradient_BSD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.collectives.all_gather(gradient_BSD, "tensor", SEQUENCE), None, None


def _sum_and_scatter(x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
    """A sum of t terms that is rounded once, where one in bfloat16 is rounded at each addition."""
    wide_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, sum_dtype))
    return collectives.reduce_scatter(wide_BSD, "tensor", SEQUENCE).to(x_BSD.dtype)
