"""Hashes of documents, which decide what is a duplicate, what is for validation, and what is sampled for training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from services.tokenizer.text_batch import TextBatch

DIGEST_BYTES = 16
"""Bytes of a digest. Of 20 billion documents, two different ones have equal digests with a probability of 10**-18."""

# The seeds of passes over a source follow this one. They differ from the one for validation: with one hash for both,
# the documents that a weight below 1 takes for training would begin where those for validation end.
_VALIDATION_SEED = 0


def normalise(document: bytes) -> bytes:
    """Return what exact duplicates have in common: the bytes with "\\n" for every line end, and stripped.

    Line ends and white space at both ends are traces of the tool that stored a text. Everything else is the concern of
    fuzzy deduplication, as in NeMo Curator and Dolma.
    """
    if b"\r" in document:
        document = document.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return document.strip()


def digest_documents(batch: TextBatch) -> bytes:
    """Return the xxh3-128 digests of the normalised documents of a batch, one after the other.

    As Python objects they would take 57 bytes each.
    """
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(normalise(bytes(view))) for view in batch.views()])


def take_new(batch: TextBatch, seen: set[bytes]) -> TextBatch:
    """Return the documents that have no exact duplicate among those of the digests `seen`, which get theirs."""
    digests = digest_documents(batch)
    is_new = np.zeros(len(batch), np.bool_)
    for index in range(len(batch)):
        digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        is_new[index] = digest not in seen
        seen.add(digest)
    return batch.select(is_new)


def are_for_validation(batch: TextBatch, fraction: float) -> npt.NDArray[np.bool_]:
    """Mark the documents of the validation split. Equal documents are marked alike."""
    if fraction == 0:
        return np.zeros(len(batch), np.bool_)
    return _shares(batch, _VALIDATION_SEED) < fraction


def are_for_training(batch: TextBatch, weight: float, pass_number: int) -> npt.NDArray[np.bool_]:
    """Mark the documents that one pass over their source takes, unless they are for validation.

    With weight 2.5, passes 0 and 1 take all documents, and pass 2 takes half of them.
    """
    if weight - pass_number >= 1:
        return np.ones(len(batch), np.bool_)
    return sampling_keys(batch, weight, pass_number) < 1


def sampling_keys(batch: TextBatch, weight: float, pass_number: int) -> npt.NDArray[np.float64]:
    """Return a key for every document in one pass over its source. The pass takes the documents with keys below 1.

    Keys are spread evenly, and more densely for a larger weight. So the smallest keys of all passes over all sources
    are a sample in which each source has its share by weight.
    """
    return _shares(batch, _VALIDATION_SEED + 1 + pass_number) / min(1.0, weight - pass_number)


def _shares(batch: TextBatch, seed: int) -> npt.NDArray[np.float64]:
    """Return a number from 0 to 1 for every document, from a hash of its bytes."""
    digest = xxhash.xxh3_64_intdigest
    hashes = np.fromiter((digest(view, seed) for view in batch.views()), np.uint64, len(batch))
    return hashes / 2.0**64
