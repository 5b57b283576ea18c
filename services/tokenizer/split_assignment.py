"""Which documents enter the corpus, and which of them training never sees: by their content alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from services.tokenizer.text_batch import TextBatch

Hashes = npt.NDArray[np.uint64]

# Another hash than the one that chooses validation documents, or a sampled corpus would have none.
_SAMPLING_SEED = 1


def are_for_validation(batch: TextBatch, fraction: float) -> npt.NDArray[np.bool_]:
    """By the hash of the document, so that equal documents are never on both sides."""
    if fraction == 0:
        return np.zeros(len(batch), np.bool_)
    return _shares(batch, seed=0) < fraction


def are_sampled(batch: TextBatch, weight: float, pass_number: int) -> npt.NDArray[np.bool_]:
    """Whether documents enter the corpus in this pass over their source: in every pass that fits into the weight, and
    in the last one with the probability that is left of it.
    """
    left = weight - pass_number
    return np.ones(len(batch), np.bool_) if left >= 1 else _shares(batch, _SAMPLING_SEED) < left


def _shares(batch: TextBatch, seed: int) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each document."""
    digest = xxhash.xxh3_64_intdigest
    hashes = np.fromiter((digest(view, seed) for view in batch.views()), np.uint64, len(batch))
    return hashes / 2.0**64
