"""The interface of all encoders, and the comparison of an encoder with its reference before its ids are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Vocabulary
from services.common.errors import DeviceError
from services.tokenizer.text_batch import TextBatch

TokenIds = npt.NDArray[np.integer[Any]]
Offsets = npt.NDArray[np.int64]
TokenDtype = Literal["uint16", "uint32"]

FUZZ_DOCUMENTS = 400
"""Random documents of fuzz, besides those of the vocabulary's added tokens."""
SAMPLED_DOCUMENTS = 2_000
SAMPLED_BYTES = 2**19
"""Bytes of the corpus's text that all workers together compare. SentencePiece takes 0.1 s for them."""
MIN_SAMPLED_BYTES = 2**18
"""Bytes of the corpus's text that a worker compares at least: each may run on a machine of its own."""
SAMPLED_BYTES_OF_A_DOCUMENT = 2**16
"""Bytes of one document that are compared. SentencePiece takes 40 times a document's size in memory."""

_SHOWN_IDS = 60


class Encoder(Protocol):
    name: str
    """Name for logs and the manifest, with the library's version where a library encodes."""

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """Return the ids of all documents in one array, each document as BOS, if there is one, + its tokens + EOS.

        Document i is `ids[offsets[i]:offsets[i + 1]]`. A document whose text has no token gets no ids, not even BOS and
        EOS. Special tokens are never found in text: `</s>` that an author typed is encoded as characters.
        """
        ...


def token_dtype(vocab_size: int) -> TokenDtype:
    """Return the smallest integer type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def join_documents(encoded: list[npt.NDArray[Any]], vocabulary: Vocabulary) -> tuple[TokenIds, Offsets]:
    """Make the result of `Encoder.encode` from one array of ids, without BOS and EOS, for each document."""
    borders = vocabulary.num_special_tokens
    sizes = np.fromiter((len(ids) + borders if len(ids) else 0 for ids in encoded), np.int64, len(encoded))
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    joined: TokenIds = np.empty(int(offsets[-1]), token_dtype(vocabulary.vocab_size))
    for index in np.flatnonzero(sizes).tolist():
        begin, end = offsets[index], offsets[index + 1]
        if vocabulary.bos_id is not None:
            joined[begin] = vocabulary.bos_id
        joined[begin + borders - 1 : end - 1] = encoded[index]
        joined[end - 1] = vocabulary.eos_id
    return joined, offsets


class CheckedEncoder:
    """Compares an encoder with its reference, on fuzz and on the first documents. A difference is a `DeviceError`."""

    def __init__(self, encoder: Encoder, reference: Encoder, fuzz: Sequence[bytes], sampled_bytes: int) -> None:
        self._encoder, self._reference = encoder, reference
        self.name = encoder.name
        self._documents_checked = 0
        self._documents_left, self._bytes_left = SAMPLED_DOCUMENTS, sampled_bytes
        self._check(TextBatch.of(fuzz))

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        if self._documents_left > 0 and self._bytes_left > 0:
            sample = batch.prefixes(SAMPLED_BYTES_OF_A_DOCUMENT)
            is_sampled = np.cumsum(sample.sizes) <= self._bytes_left
            is_sampled[self._documents_left :] = False
            sample = sample.select(is_sampled)
            self._check(sample)
            self._documents_left -= len(sample)
            self._bytes_left -= sample.text_bytes
        return self._encoder.encode(batch)

    def take_documents_checked(self) -> int:
        """Return how many documents were compared since the last call of this method."""
        checked, self._documents_checked = self._documents_checked, 0
        return checked

    def _check(self, batch: TextBatch) -> None:
        if self._encoder is self._reference:
            return
        different = find_difference(self._encoder, self._reference, batch)
        if different is not None:
            raise DeviceError(_describe(self._encoder, self._reference, different))
        self._documents_checked += len(batch)


def find_difference(encoder: Encoder, reference: Encoder, batch: TextBatch) -> bytes | None:
    """Return the first document of the batch that the two encode differently, or None."""
    ids, offsets = encoder.encode(batch)
    expected_ids, expected_offsets = reference.encode(batch)
    if np.array_equal(offsets, expected_offsets) and np.array_equal(ids, expected_ids):
        return None
    for index, document in enumerate(batch.views()):
        found = ids[offsets[index] : offsets[index + 1]]
        if not np.array_equal(found, expected_ids[expected_offsets[index] : expected_offsets[index + 1]]):
            return bytes(document)
    return None


def _describe(encoder: Encoder, reference: Encoder, document: bytes) -> str:
    document = _shrink(encoder, reference, document)
    batch = TextBatch.of([document])
    found, expected = (each.encode(batch)[0][:_SHOWN_IDS].tolist() for each in (encoder, reference))
    return (
        f"{encoder.name} gives other ids than {reference.name} for a document. Nothing was published.\n"
        f"  document  {document.decode()!r}\n"
        f"  found     {found}\n"
        f"  expected  {expected}\n"
        f'Set tokenizer.encoder = "reference" to encode with {reference.name}, and report this document.'
    )


def _shrink(encoder: Encoder, reference: Encoder, document: bytes) -> bytes:
    """Return a smaller document that the two still encode differently: cut it from either end as long as they do."""
    text = document.decode()
    step = len(text) // 2
    while step:
        shorter = [text[:-step], text[step:]]
        batch = TextBatch.of([each.encode() for each in shorter])
        different = find_difference(encoder, reference, batch)
        if different is None:
            step //= 2
        else:
            text = different.decode()
            step = min(step, len(text) // 2)
    return text.encode()
