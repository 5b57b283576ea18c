"""Digests of documents, by which exact duplicates are found.

Two documents are exact duplicates when their normalised bytes are equal. The normalised bytes are the document's UTF-8
bytes, after the repair of invalid ones, with "\\n" for every "\\r\\n" and "\\r", and without the ASCII white space at
both ends. Nothing else is changed: like NeMo Curator's and Dolma's exact deduplication this compares the text as it
is, while case, punctuation and inner white space are the concern of fuzzy deduplication. Line ends and white space at
the ends are the traces of the tool that stored a text, and a reader sees none of them.
"""

from __future__ import annotations

import numpy as np
import xxhash

from services.tokenizer.text_batch import TextBatch

DIGEST_BYTES = 16
"""Bytes of a digest. Of 20 billion documents, two different ones have equal digests with a probability of 10**-18."""


def normalise(document: bytes) -> bytes:
    """Return the bytes that a document has in common with its exact duplicates."""
    if b"\r" in document:
        document = document.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return document.strip()


def digest_documents(batch: TextBatch) -> bytes:
    """Return the xxh3-128 digests of the normalised documents of a batch, one after the other."""
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(normalise(bytes(view))) for view in batch.views()])


class SeenDocuments:
    """The documents seen so far, of which about 100 bytes of memory are kept for each."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def take_new(self, batch: TextBatch) -> TextBatch:
        """Return the documents that have no exact duplicate among those seen before, and remember all of them."""
        digests = digest_documents(batch)
        is_new = np.zeros(len(batch), np.bool_)
        for index in range(len(batch)):
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            is_new[index] = digest not in self._digests
            self._digests.add(digest)
        return batch.select(is_new)
