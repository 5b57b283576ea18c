"""Cuts training samples from the rows of a corpus, with one copy, which widens the ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import CorpusPayload, Split
from services.common.artifacts.corpus_rows import CorpusRows, Row, advise_verify, require_documents, require_own_ids
from services.common.errors import ArtifactError


class DocumentBatch(NamedTuple):
    """Samples and the documents in them, for masks that keep attention within a document.

    `segment_ids` and `positions` describe the L inputs. Positions of a document that began before the sample count from
    the sample's first token, because nothing in the sample can attend to earlier tokens.
    """

    tokens: npt.NDArray[np.int64]
    """[n, L + 1]"""
    segment_ids: npt.NDArray[np.int32]
    """[n, L] number of the token's document in the sample, from 0"""
    positions: npt.NDArray[np.int32]
    """[n, L] distance of the token from its document's first one, from 0"""


class Samples(ABC):
    """Gives random access to samples.

    Every row that a sample is cut from is checked. Training reads the samples below `num_samples`. An evaluation reads
    those below `num_padded_samples`: the last may be padded, so that together they have each target of the split once.
    """

    sequence_length: int
    num_padded_samples: int

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return samples as int64 [len(indices), L + 1]; columns [:-1] are the inputs and [1:] the targets.

        A padded sample ends with the id 0. Raises `ArtifactError` for a damaged row, and for an id outside the
        vocabulary, with which a compiled graph would read foreign memory.
        """
        wanted = np.asarray(indices, dtype=np.int64).tolist()
        samples = np.zeros((len(wanted), self.sequence_length + 1), dtype=np.int64)
        for index, sample in zip(wanted, samples, strict=True):
            self.fill(sample, index)
        return samples

    def read_documents(self, indices: npt.ArrayLike) -> DocumentBatch:
        """Return samples as `read` does, with the documents in them."""
        wanted, length = np.asarray(indices, dtype=np.int64).tolist(), self.sequence_length
        samples = np.zeros((len(wanted), length + 1), dtype=np.int64)
        segment_ids, positions = (np.empty((len(wanted), length), np.int32) for _ in range(2))
        places = np.arange(length, dtype=np.int32)
        for position, index in enumerate(wanted):
            starts = self.fill(samples[position], index).doc_starts
            starts = np.concatenate(([0], starts[starts > 0]))
            sizes = np.diff(starts, append=length)
            segment_ids[position] = np.repeat(np.arange(len(starts)), sizes)
            positions[position] = places - np.repeat(starts, sizes)
        return DocumentBatch(samples, segment_ids, positions)

    @abstractmethod
    def fill(self, sample: npt.NDArray[np.int64], index: int) -> Row:
        """Write the ids of a sample into `sample`, [L + 1]; return the row with which it begins."""


class TokenStream(Samples):
    """The samples of one split of a corpus."""

    def __init__(self, folder: Path, corpus: CorpusPayload, split: Split, rows: CorpusRows | None = None) -> None:
        """Open nothing. Streams of both splits that get the same `rows` share the bound of its maps."""
        counts = corpus.splits[split]
        self.sequence_length = corpus.sequence_length
        self.num_samples = corpus.num_samples(split)
        self.num_tokens = counts.tokens
        self.num_padded_samples = -(-max(0, counts.tokens - 1) // corpus.sequence_length)
        self.num_rows = counts.rows
        self._folder, self._corpus, self._split = folder, corpus, split
        self._rows = rows or CorpusRows(folder, corpus)

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read the rows of these samples, in 4 us where files are mapped. `read` finds damage."""
        for index in np.asarray(indices, dtype=np.int64).tolist():
            for row in (index, index + 1) if index < self.num_rows else (index,):
                self._rows.prefetch(self._split, row)

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the positions in the split at which its documents begin, in ascending order: 8 bytes a document.

        Reads `doc_starts` alone, so no row is checked. Raises `ArtifactError` where they do not rise, or are not as
        many as the manifest says.
        """
        begins: list[npt.NDArray[np.int64]] = []
        for number in range(self._corpus.num_shards(self._split) + 1):
            file = self._rows.map(self._split, number)
            rows, per_row = np.asarray(file.rows, np.int64) * self.sequence_length, np.diff(file.start_offsets)
            if np.any(per_row < 0) or per_row.sum() != len(file.starts):
                raise ArtifactError(f"{file.path}: its doc_starts are damaged. {advise_verify(self._folder)}")
            begins.append(np.repeat(rows, per_row) + file.starts)
        found = np.concatenate(begins)
        if np.any(np.diff(found) <= 0):
            place = self._folder / self._split
            raise ArtifactError(f"{place}: its doc_starts are damaged. {advise_verify(self._folder)}")
        require_documents(self._folder, self._corpus, self._split, len(found))
        return found

    def fill(self, sample: npt.NDArray[np.int64], index: int) -> Row:
        row = self._rows.read(self._split, index)
        sample[: len(row.ids)] = row.ids
        if index < self.num_rows:
            following = self._rows.read(self._split, index + 1).ids[:1]
            sample[self.sequence_length : self.sequence_length + len(following)] = following
        require_own_ids(self._folder, sample, self._corpus.vocabulary.vocab_size)
        return row
