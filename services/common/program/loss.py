"""Next-token cross-entropy, with the language-model head applied to a few hundred tokens at a time.

Training takes the mean with its gradient (`next_token_loss`), and an evaluation the loss of each target without one
(`next_token_losses`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.program.backends.backend import Collectives
from services.common.program.layers import cut_padding, gather_sequence, mask_padding, row_ids


def next_token_loss(
    hidden_BSD: Tensor,
    lm_head_VD: Tensor,
    targets_BS: Tensor,
    chunk_tokens: int,
    collectives: Collectives,
    reduce_dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy in nats over all B * S targets, computed in chunks of `chunk_tokens` tokens.

    With `z_loss` the gradient is that of the cross-entropy + `z_loss` * mean(log(Z)^2). This penalty keeps Z, the
    softmax's sum of exponentials, near 1 (PaLM, arXiv 2204.02311, section 5). The returned value leaves the penalty
    out, so that runs with and without it can be compared.

    Where the tensor axis has t ranks, `hidden_BSD` is this rank's slice of the sequence and `lm_head_VD` its rows of
    the vocabulary; all ranks return the same loss. The hidden states' gradients are summed over the ranks in
    `reduce_dtype`, or in their own dtype where that is wider.

    With `vocab_size` the head's rows from that one on are padding: they take no probability, and their gradient is 0.

    The float32 logits [B * S, V] are the largest tensor of a small model, and chunks of them that stay in the
    processor's cache are faster. With one chunk for all tokens the loss is bit-equal to that of transformers.
    """
    hidden_TD = gather_sequence(hidden_BSD, collectives, reduce_dtype).flatten(0, 1)
    lm_head_VD = cut_padding(lm_head_VD, vocab_size, collectives)
    targets_T = targets_BS.flatten()
    if collectives.mesh.tensor_parallel_size > 1:
        arguments = (hidden_TD, lm_head_VD, targets_T, chunk_tokens, collectives, z_loss, vocab_size)
        return _VocabularyParallelLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    if not torch.compiler.is_compiling() and collectives.runs_eagerly:
        return _ChunkedLoss.apply(hidden_TD, lm_head_VD, targets_T, chunk_tokens, z_loss)  # type: ignore[no-untyped-call]
    # A compiler fuses this by itself, and AOTAutograd does not cache a graph with an autograd function of our own.
    total = torch.zeros((), dtype=torch.float32, device=hidden_BSD.device)
    wide_head_VD = lm_head_VD.float()  # so that autograd sums the chunks' gradients in float32, and rounds once
    for chunk_TD, chunk_T in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
        logits_TV = F.linear(chunk_TD, wide_head_VD.to(lm_head_VD.dtype)).float()
        total = total + F.cross_entropy(logits_TV, chunk_T, reduction="sum")
        if z_loss:
            penalty = z_loss * logits_TV.logsumexp(-1).square().sum()
            total = total + (penalty - penalty.detach())  # the value 0, with the gradient of the penalty
    return total / targets_T.numel()


def next_token_losses(
    hidden_BSD: Tensor,
    lm_head_VD: Tensor,
    targets_BS: Tensor,
    chunk_tokens: int,
    collectives: Collectives,
    reduce_dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy of each target in nats, float32 [B, S]; see `next_token_loss`. It has no gradient."""
    hidden_TD = gather_sequence(hidden_BSD, collectives, reduce_dtype).flatten(0, 1)
    lm_head_VD = cut_padding(lm_head_VD, vocab_size, collectives)
    chunks = zip(hidden_TD.split(chunk_tokens), targets_BS.flatten().split(chunk_tokens), strict=True)
    if collectives.mesh.tensor_parallel_size > 1:
        row_ids_V = row_ids(lm_head_VD.shape[0], lm_head_VD.device, collectives)
        parts = [
            _compare(F.linear(c_TD, lm_head_VD), c_T, row_ids_V, collectives, vocab_size).losses for c_TD, c_T in chunks
        ]
    else:
        parts = [F.cross_entropy(F.linear(c_TD, lm_head_VD).float(), c_T, reduction="none") for c_TD, c_T in chunks]
    return torch.cat(parts).view(targets_BS.shape)


class _ChunkedLoss(torch.autograd.Function):
    """Chunked loss on one rank, whose forward pass also computes the gradients.

    So only one chunk's logits exist at a time, and they stay in the processor's cache. The head's gradients of all
    chunks are summed in float32. In float32, one chunk for all tokens has the bits of `F.cross_entropy` and its
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        lm_head_VD: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        z_loss: float,
    ) -> Tensor:
        scale = 1.0 / targets_T.numel()
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        hidden_gradients: list[Tensor] = []
        head_gradient_VD: Tensor | None = None
        for chunk_TD, chunk_T in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
            products_TV = F.linear(chunk_TD, lm_head_VD)
            logits_TV = products_TV.float()
            log_z_T1 = logits_TV.logsumexp(-1, keepdim=True) if z_loss else None
            log_softmax_TV = F.log_softmax(logits_TV, -1)
            del logits_TV
            total = total + F.nll_loss(log_softmax_TV, chunk_T, reduction="sum")
            output_TV = torch.zeros_like(log_softmax_TV).scatter_(1, chunk_T[:, None], -scale)
            gradient_TV = torch.ops.aten._log_softmax_backward_data(output_TV, log_softmax_TV, 1, torch.float32)
            if log_z_T1 is not None:
                gradient_TV += log_softmax_TV.exp_().mul_(2.0 * z_loss * scale * log_z_T1)
            gradient_TV = gradient_TV.to(products_TV.dtype)
            hidden_gradients.append(gradient_TV @ lm_head_VD)
            factors = gradient_TV.t(), chunk_TD.to(products_TV.dtype)
            if head_gradient_VD is None:
                head_gradient_VD = torch.mm(*factors).float()
            elif products_TV.dtype == torch.float32:
                head_gradient_VD.addmm_(*factors)
            else:
                head_gradient_VD += torch.mm(*factors)  # addmm_ would round the sum to the products' type
        assert head_gradient_VD is not None
        ctx.save_for_backward(torch.cat(hidden_gradients), head_gradient_VD.to(lm_head_VD.dtype))
        return total / targets_T.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient_TD, head_gradient_VD = ctx.saved_tensors
        return hidden_gradient_TD * gradient, head_gradient_VD * gradient, None, None, None


class _VocabularyParallelLoss(torch.autograd.Function):
    """Chunked loss over ranks that each hold rows of the vocabulary (arXiv 1909.08053, section 3).

    The forward pass also computes the gradients, so that no chunk's logits outlive it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        lm_head_VD: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        collectives: Collectives,
        z_loss: float,
        vocab_size: int | None,
    ) -> Tensor:
        row_ids_V, scale = row_ids(lm_head_VD.shape[0], lm_head_VD.device, collectives), 1.0 / targets_T.numel()
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        hidden_gradients = []
        head_gradient_VD = torch.zeros(lm_head_VD.shape, dtype=torch.float32, device=lm_head_VD.device)
        for chunk_TD, chunk_T in zip(hidden_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True):
            found = _compare(F.linear(chunk_TD, lm_head_VD), chunk_T, row_ids_V, collectives, vocab_size)
            total = total + found.losses.sum()
            softmax_TV = found.exponentials / found.sums
            gradient_TV = softmax_TV - found.is_target
            if z_loss:
                log_z_T1 = found.sums.log() + found.largest
                gradient_TV = gradient_TV + softmax_TV * (2.0 * z_loss * log_z_T1)
            gradient_TV = (gradient_TV * scale).to(chunk_TD.dtype)
            hidden_gradients.append(gradient_TV @ lm_head_VD)
            head_gradient_VD = head_gradient_VD + (gradient_TV.t() @ chunk_TD).float()
        hidden_gradient_TD = torch.cat(hidden_gradients).to(hidden_TD.dtype)
        ctx.save_for_backward(hidden_gradient_TD, head_gradient_VD.to(lm_head_VD.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        hidden_gradient_TD, head_gradient_VD = ctx.saved_tensors
        return hidden_gradient_TD * gradient, head_gradient_VD * gradient, None, None, None, None, None


class _Comparison(NamedTuple):
    """Targets of T tokens compared with the logits of a rank's rows of the vocabulary."""

    losses: Tensor
    """[T] cross-entropy of each target in nats, the same on all ranks."""
    exponentials: Tensor
    """[T, V] exponentials of this rank's logits, each token's largest logit subtracted."""
    sums: Tensor
    """[T, 1] sums of the exponentials over the whole vocabulary."""
    largest: Tensor
    """[T, 1] largest logit of each token in the whole vocabulary."""
    is_target: Tensor
    """[T, V] 1 where the row is the token's target, otherwise 0."""


def _compare(
    logits_TV: Tensor, targets_T: Tensor, row_ids_V: Tensor, collectives: Collectives, vocab_size: int | None
) -> _Comparison:
    logits_TV = mask_padding(logits_TV.float(), vocab_size, collectives)
    largest_T1 = collectives.all_reduce(logits_TV.amax(-1, keepdim=True), "tensor", "max")
    shifted_TV = logits_TV - largest_T1
    is_target_TV = (row_ids_V == targets_T[:, None]).float()
    exponentials_TV = shifted_TV.exp()
    parts_2T = torch.stack([exponentials_TV.sum(-1), (shifted_TV * is_target_TV).sum(-1)])
    sums_2T = collectives.all_reduce(parts_2T, "tensor")
    losses_T = sums_2T[0].log() - sums_2T[1]
    return _Comparison(losses_T, exponentials_TV, sums_2T[0][:, None], largest_T1, is_target_TV)
