"""What every encoder does, and what it is made from."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from services.tokenizer.text_batch import TextBatch

TokenIds = npt.NDArray[np.integer[Any]]
Offsets = npt.NDArray[np.int64]
TokenDtype = Literal["uint16", "uint32"]

BOS_AND_EOS = 2
"""Tokens around each document."""


class Encoder(Protocol):
    name: str
    """For logs and the manifest, with the version of the library behind it, if there is one."""

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """Ids of all documents, one after another, each as BOS + its tokens + EOS.

        Document i is `ids[offsets[i]:offsets[i + 1]]`, and nothing when its text has no token. Text is text: `</s>`
        typed in a document is not the EOS piece.
        """
        ...


def token_dtype(vocab_size: int) -> TokenDtype:
    """The smallest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def join_documents(
    encoded: list[npt.NDArray[Any]], bos_id: int, eos_id: int, dtype: np.dtype[Any]
) -> tuple[TokenIds, Offsets]:
    """What `Encoder.encode` returns, from the ids of each document without BOS and EOS."""
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
