"""What one forward and backward pass takes, and what a graph knows of the data: shapes alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.common.recipe import Recipe


class MicroBatch(NamedTuple):
    tokens: Tensor
    """int64 [B, L + 1]: columns [:-1] are inputs, and [1:] the targets."""
    positions: Tensor | None = None
    """int32 [B, L]: each input's distance from the begin of its document, or of the row where the document began before
    it. None where a row is attended to as one document."""

    def to(self, device: torch.device) -> MicroBatch:
        positions = None if self.positions is None else _send(self.positions, device)
        return MicroBatch(_send(self.tokens, device), positions)


def _send(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. From pageable memory a GPU copies only when it has done all it was asked for before,
    and the host waits for that: the next micro-batch's kernels would be launched late.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def make_synthetic_micro_batch(recipe: Recipe) -> MicroBatch:
    """With the shapes of the recipe's micro-batches: a graph depends on these, and not on the tokens."""
    size, length = recipe.batch.micro_batch_size, recipe.corpus.sequence_length
    has_documents = recipe.train.attention_mask == "block_causal"
    positions_BS = torch.arange(length, dtype=torch.int32).repeat(size, 1) if has_documents else None
    tokens_BS = torch.arange(size * (length + 1)).view(size, length + 1) % recipe.model.vocab_size
    return MicroBatch(tokens_BS, positions_BS)
