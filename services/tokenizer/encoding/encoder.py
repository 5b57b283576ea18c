"""The interface of all encoders, and functions that encoders share."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from services.tokenizer.text_batch import TextBatch

TokenIds = npt.NDArray[np.integer[Any]]
Offsets = npt.NDArray[np.int64]
TokenDtype = Literal["uint16", "uint32"]

BOS_AND_EOS = 2
"""Number of tokens that are stored around a document: one BOS before it and one EOS behind it."""


class Encoder(Protocol):
    name: str
    """Name for logs and the manifest, with the library's version where a library encodes."""

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """Return the ids of all documents in one array, each document as BOS + its tokens + EOS.

        Document i is `ids[offsets[i]:offsets[i + 1]]`. A document whose text has no token gets no ids, not even BOS and
        EOS. Special tokens are never found in text: `</s>` that an author typed is encoded as characters.
        """
        ...


def token_dtype(vocab_size: int) -> TokenDtype:
    """Return the smallest integer type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def join_documents(
    encoded: list[npt.NDArray[Any]], bos_id: int, eos_id: int, dtype: np.dtype[Any]
) -> tuple[TokenIds, Offsets]:
    """Make the result of `Encoder.encode` from one array of ids, without BOS and EOS, for each document."""
    sizes = np.fromiter((len(ids) + BOS_AND_EOS if len(ids) else 0 for ids in encoded), np.int64, len(encoded))
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    joined = np.empty(int(offsets[-1]), dtype)
    for index in np.flatnonzero(sizes).tolist():
        begin, end = offsets[index], offsets[index + 1]
        joined[begin] = bos_id
        joined[begin + 1 : end - 1] = encoded[index]
        joined[end - 1] = eos_id
    return joined, offsets
