"""Micro-batches: the input of one forward and backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.common.recipe.schema import Recipe


class MicroBatch(NamedTuple):
    """Tokens of a micro-batch, and their positions where documents are kept apart."""

    tokens: Tensor
    """int64 [B, L + 1]: columns [:-1] are inputs, columns [1:] are targets."""
    positions: Tensor | None = None
    """int32 [B, L]: distance of each input from the first token of its document, or from the start of the row where the
    document started before it. None where attention takes a row as one document."""


def make_synthetic_micro_batch(recipe: Recipe) -> MicroBatch:
    """Make a micro-batch of the recipe's shapes. A graph depends on these alone, and not on the tokens."""
    size, length = recipe.batch.micro_batch_size, recipe.corpus.sequence_length
    has_documents = recipe.train.attention_mask == "block_causal"
    positions_BS = torch.arange(length, dtype=torch.int32).repeat(size, 1) if has_documents else None
    tokens_BS = torch.arange(size * (length + 1)).view(size, length + 1) % recipe.model.vocab_size
    return MicroBatch(tokens_BS, positions_BS)
