"""Batches of documents in one buffer of bytes, which sources pass to encoders without a Python object a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BATCH_BYTES = 4 * 2**20
"""Bytes of text in a batch. A larger document is a batch of its own."""


@dataclass(frozen=True)
class TextBatch:
    """Documents, of which number i is `text[begins[i]:ends[i]]`. Batches of `read_documents` are valid UTF-8."""

    text: npt.NDArray[np.uint8]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    num_repaired: int = 0
    """Number of documents in which U+FFFD replaces bytes that were not UTF-8."""

    @classmethod
    def of(cls, documents: Sequence[bytes], num_repaired: int = 0) -> TextBatch:
        sizes = np.fromiter(map(len, documents), np.int64, len(documents))
        ends = np.cumsum(sizes)
        return cls(np.frombuffer(b"".join(documents), np.uint8), ends - sizes, ends, num_repaired)

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Size of every document in bytes."""
        return self.ends - self.begins

    @property
    def text_bytes(self) -> int:
        return int(self.sizes.sum())

    def select(self, is_wanted: npt.NDArray[np.bool_]) -> TextBatch:
        """Return a batch of the marked documents. The text is not copied."""
        return TextBatch(self.text, self.begins[is_wanted], self.ends[is_wanted], self.num_repaired)

    def prefixes(self, max_bytes: int) -> TextBatch:
        """Cut every document to at most `max_bytes`, between two characters. The text is not copied."""
        ends = np.minimum(self.ends, self.begins + max_bytes)
        for index in np.flatnonzero(ends < self.ends).tolist():
            while self.text[ends[index]] & 0xC0 == 0x80:
                ends[index] -= 1
        return TextBatch(self.text, self.begins, ends)

    def views(self) -> Iterator[memoryview]:
        """Yield the documents one by one, without a copy."""
        view = memoryview(self.text.data)
        for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True):
            yield view[begin:end]

    def documents(self) -> list[bytes]:
        return [bytes(view) for view in self.views()]


def in_batches(documents: Iterable[bytes]) -> Iterator[TextBatch]:
    """Yield the documents in batches of about BATCH_BYTES."""
    batch: list[bytes] = []
    batch_bytes = 0
    for document in documents:
        batch.append(document)
        batch_bytes += len(document)
        if batch_bytes >= BATCH_BYTES:
            yield TextBatch.of(batch)
            batch, batch_bytes = [], 0
    if batch:
        yield TextBatch.of(batch)


def join_small(batches: Iterable[TextBatch]) -> Iterator[TextBatch]:
    """Join small batches into batches of about BATCH_BYTES. A folder of small files gives a batch for each file."""
    waiting: list[TextBatch] = []
    waiting_bytes = 0
    for batch in batches:
        if not len(batch):
            continue
        if waiting and waiting_bytes + batch.text_bytes > BATCH_BYTES:
            yield _join(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(batch)
        waiting_bytes += batch.text_bytes
    if waiting:
        yield _join(waiting)


def _join(batches: list[TextBatch]) -> TextBatch:
    if len(batches) == 1:
        return batches[0]
    texts = [batch.text[batch.begins[0] : batch.ends[-1]] for batch in batches]
    ends = np.cumsum(np.concatenate([batch.sizes for batch in batches]))
    num_repaired = sum(batch.num_repaired for batch in batches)
    return TextBatch(np.concatenate(texts), np.append(0, ends[:-1]), ends, num_repaired)
