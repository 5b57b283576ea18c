"""Tensor-parallel layers with sequence parallelism (Megatron-LM, arXiv 1909.08053 and 2205.05198).

Between blocks each of the t ranks of the tensor axis holds a slice of the sequence, [B, S / t, D], which is enough for
norms and residuals. A block all-gathers the sequence, computes with its shard of the weights, and reduce-scatters the
result. On one rank every layer is the plain layer, and no collective runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.common.program.backends.backend import Collectives
from services.common.program.mesh import Mesh
from services.common.program.sharding import HeadKind, Sharding, shard_along

SEQUENCE = 1
"""Dimension of an activation [B, S, D] along which its slices lie."""
PADDING_LOGIT = -1e30
"""Logit of a row of padding. Its exponential is 0, and bfloat16 holds it, so that 0 times it is 0."""


class Linear(nn.Module):
    """Linear layer x W^T without a bias. This rank holds one shard of W [out, in], sharded along `dim`."""

    def __init__(
        self, in_features: int, out_features: int, mesh: Mesh, dim: int, heads: HeadKind | None = None
    ) -> None:
        super().__init__()
        self.sharding = shard_along(mesh, dim, heads)
        shape = [out_features, in_features]
        shape[dim] //= self.sharding.num_shards
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x_BSI: Tensor) -> Tensor:
        return F.linear(x_BSI, self.weight)


class ColumnParallelLinear(Linear):
    """Linear layer sharded by outputs, the columns of W^T: a rank computes some of them for the whole sequence."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, heads: HeadKind | None = None) -> None:
        super().__init__(in_features, out_features, mesh, dim=0, heads=heads)


class RowParallelLinear(Linear):
    """Linear layer sharded by inputs, the rows of W^T: `reduce_scatter_sequence` then sums the ranks' results."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, heads: HeadKind | None = None) -> None:
        super().__init__(in_features, out_features, mesh, dim=1, heads=heads)


class VocabularyParallelLinear(Linear):
    """Language-model head [V, D] sharded by rows, the last of which are padding where V does not divide."""

    def __init__(self, hidden_size: int, num_rows: int, mesh: Mesh) -> None:
        super().__init__(hidden_size, _padded(num_rows, mesh), mesh, dim=0)
        self.sharding = _shard_rows(num_rows, mesh)


class VocabularyParallelEmbedding(nn.Module):
    """Embedding table [V, D] sharded by rows, the last of which are padding where V does not divide. A rank returns
    zeros for tokens of other shards: sum over the ranks.
    """

    def __init__(self, num_rows: int, hidden_size: int, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self.sharding = _shard_rows(num_rows, collectives.mesh)
        rows_of_shard = _padded(num_rows, collectives.mesh) // self.sharding.num_shards
        self.weight = nn.Parameter(torch.empty(rows_of_shard, hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        if self.sharding.num_shards == 1:
            return F.embedding(tokens_BS, self.weight)
        num_rows = self.weight.shape[0]
        rows_BS = tokens_BS - self._collectives.index("tensor") * num_rows
        is_here_BS = (rows_BS >= 0) & (rows_BS < num_rows)
        found_BSD = F.embedding(torch.where(is_here_BS, rows_BS, torch.zeros_like(rows_BS)), self.weight)
        return found_BSD * is_here_BS[..., None].to(found_BSD.dtype)


def _padded(num_rows: int, mesh: Mesh) -> int:
    return num_rows + -num_rows % mesh.tensor_parallel_size


def _shard_rows(num_rows: int, mesh: Mesh) -> Sharding:
    return shard_along(mesh, 0, length=num_rows if num_rows % mesh.tensor_parallel_size else None)


def row_ids(num_rows: int, device: torch.device, collectives: Collectives) -> Tensor:
    """Return the ids of this rank's rows of the vocabulary."""
    return torch.arange(num_rows, device=device) + collectives.index("tensor") * num_rows


def cut_padding(lm_head_VD: Tensor, vocab_size: int | None, collectives: Collectives) -> Tensor:
    """Return the head without the padding from row `vocab_size` on. Ranks that share it keep the padding, so that all
    of them trace one graph, and hide it with `mask_padding`.
    """
    if vocab_size is None or collectives.mesh.tensor_parallel_size > 1 or lm_head_VD.shape[0] <= vocab_size:
        return lm_head_VD
    return lm_head_VD[:vocab_size]


def mask_padding(logits_TV: Tensor, vocab_size: int | None, collectives: Collectives) -> Tensor:
    """Return logits of a rank's rows, those of padding set to PADDING_LOGIT: they take no probability."""
    num_rows = logits_TV.shape[-1]
    if vocab_size is None or num_rows * collectives.mesh.tensor_parallel_size <= vocab_size:
        return logits_TV
    return logits_TV.masked_fill(row_ids(num_rows, logits_TV.device, collectives) >= vocab_size, PADDING_LOGIT)


class RMSNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) of this rank's slice of the sequence; its statistics are float32 for any dtype."""

    def __init__(self, size: int, epsilon: float, mesh: Mesh) -> None:
        super().__init__()
        self.sharding = Sharding(sum_axis="tensor" if mesh.tensor_parallel_size > 1 else None)
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x_BSD: Tensor) -> Tensor:
        x32_BSD = x_BSD.to(torch.float32)
        variance_BS1 = x32_BSD.pow(2).mean(-1, keepdim=True)
        return self.weight * (x32_BSD * torch.rsqrt(variance_BS1 + self.epsilon)).to(x_BSD.dtype)


def gather_sequence(x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
    """All-gather an activation's slices along the sequence: [B, S / t, D] -> [B, S, D].

    The backward pass reduce-scatters the ranks' gradients, in `sum_dtype` or in their own dtype where that is wider.
    """
    if collectives.mesh.tensor_parallel_size == 1:
        return x_BSD
    return _GatherSequence.apply(x_BSD, collectives, sum_dtype)  # type: ignore[no-untyped-call]


def reduce_scatter_sequence(x_BSD: Tensor, collectives: Collectives, sum_dtype: torch.dtype) -> Tensor:
    """Sum the ranks' activations and return this rank's slice of the sum: [B, S, D] -> [B, S / t, D].

    The sum is computed in `sum_dtype`, or in the activations' own dtype where that is wider, and returned in theirs.
    The backward pass all-gathers the slices' gradients.
    """
    if collectives.mesh.tensor_parallel_size == 1:
        return x_BSD
    return _ReduceScatterSequence.apply(x_BSD, collectives, sum_dtype)  # type: ignore[no-untyped-call]


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
    """Reduce-scatter in a wide dtype, so that the sum is rounded once: in bfloat16 each addition would round."""
    wide_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, sum_dtype))
    return collectives.reduce_scatter(wide_BSD, "tensor", SEQUENCE).to(x_BSD.dtype)
