"""Documents to token ids.

An encoder has `dtype` and `encode(documents) -> (ids, doc_offsets)`. Ids of all documents lie one after
another, each document as BOS + its tokens + EOS; document i is `ids[doc_offsets[i]:doc_offsets[i + 1]]`, and
is empty when its text has no token. Text is text: `</s>` typed in a document is not the EOS piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Vocabulary
from services.tokenizer.vocabulary import load_model

TokenIds = npt.NDArray[np.integer[Any]]
Offsets = npt.NDArray[np.int64]

BOS_AND_EOS = 2
"""Tokens around each document."""


class SentencePieceEncoder:
    """SentencePiece itself: the reference for every faster encoder."""

    def __init__(self, model: bytes) -> None:
        self._processor = load_model(model)
        self.dtype = np.dtype(token_dtype(self._processor.vocab_size()))

    def encode(self, documents: Sequence[bytes]) -> tuple[TokenIds, Offsets]:
        encoded = self._processor.encode(list(documents), out_type="numpy", add_bos=True, add_eos=True, num_threads=1)
        lengths = np.fromiter((len(ids) if len(ids) > BOS_AND_EOS else 0 for ids in encoded), np.int64, len(encoded))
        doc_offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(lengths, out=doc_offsets[1:])
        ids = np.empty(int(doc_offsets[-1]), self.dtype)
        for index in np.flatnonzero(lengths).tolist():
            ids[doc_offsets[index] : doc_offsets[index + 1]] = encoded[index]
        return ids, doc_offsets


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@lru_cache(maxsize=1)
def load_encoder(path: Path, vocabulary: Vocabulary) -> SentencePieceEncoder:
    """The encoder of a vocabulary, loaded once per process."""
    return SentencePieceEncoder(path.read_bytes())
