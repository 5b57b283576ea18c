"""What one forward and backward pass takes, and what a graph knows of the data: shapes alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MicroBatch(NamedTuple):
    tokens: Tensor
    """int64 [B, L + 1]: columns [:-1] are inputs, and [1:] the targets."""
    positions: Tensor | None = None
    """int32 [B, L]: each input's distance from the begin of its document, or of the row where the document began before
    it. None where a row is attended to as one document."""
