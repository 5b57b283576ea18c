"""Chooses documents for the corpus and for its validation split, by a hash of their content alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from services.tokenizer.text_batch import TextBatch

# The seed differs from the one for validation: with one hash for both, a sample would hold all validation documents.
_SAMPLING_SEED = 1


def are_for_validation(batch: TextBatch, fraction: float) -> npt.NDArray[np.bool_]:
    """Mark the documents of the validation split. Equal documents are marked alike."""
    if fraction == 0:
        return np.zeros(len(batch), np.bool_)
    return _shares(batch, seed=0) < fraction


def are_sampled(batch: TextBatch, weight: float, pass_number: int) -> npt.NDArray[np.bool_]:
    """Mark the documents that enter the corpus in one pass over their source.

    With weight 2.5, passes 0 and 1 take all documents, and pass 2 takes half of them.
    """
    left = weight - pass_number
    return np.ones(len(batch), np.bool_) if left >= 1 else _shares(batch, _SAMPLING_SEED) < left


def _shares(batch: TextBatch, seed: int) -> npt.NDArray[np.float64]:
    """Return a number from 0 to 1 for every document, from a hash of its bytes."""
    digest = xxhash.xxh3_64_intdigest
    hashes = np.fromiter((digest(view, seed) for view in batch.views()), np.uint64, len(batch))
    return hashes / 2.0**64
