"""The tokens of a published split and the borders of its documents, read from mapped files.

Borders come from the `doc_starts` column. Token ids say nothing about them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.artifacts.corpus import CorpusManifest, CorpusPayload, Split, tail_path
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import Artifact, open_artifact
from services.common.artifacts.token_stream import TokenFile
from services.common.errors import ArtifactError
from services.tokenizer.encoding.encoder import Offsets, TokenIds


@dataclass(frozen=True)
class Excerpt:
    """Consecutive tokens of a stream. Positions are the stream's."""

    begin: int
    tokens: TokenIds
    starts: Offsets
    """Where documents begin."""

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


def open_corpus(folder: Path) -> Artifact[CorpusManifest]:
    """A published corpus whose files are there, with the sizes that its manifest says.

    Raises `ArtifactError` for anything else. Checksums are not looked at: that takes the reading of every file.
    """
    corpus = open_artifact(folder, CorpusManifest)
    verify_files(corpus.path, corpus.manifest, level="size")
    return corpus


class StoredStream:
    """One split of a corpus. Of a corpus of any size it holds one mapped file and that file's document starts.

    Raises `ArtifactError` when a file is not what the manifest says.
    """

    def __init__(self, folder: Path, corpus: CorpusPayload, split: Split) -> None:
        counts = corpus.splits[split]
        self.num_tokens, self.num_documents = counts.tokens, counts.documents
        self._folder = folder
        self._corpus = corpus
        self._paths = (*counts.shards, tail_path(split))
        shard_tokens = corpus.rows_per_shard * corpus.sequence_length
        shard_begins = [index * shard_tokens for index in range(len(counts.shards))]
        self._borders = (*shard_begins, counts.rows * corpus.sequence_length, counts.tokens)
        """File i holds tokens [_borders[i], _borders[i + 1])."""
        self._newest: tuple[int, Excerpt] | None = None

    def files(self) -> Iterator[Excerpt]:
        """The stream, file by file."""
        return (self._map(index) for index in range(len(self._paths)))

    def read(self, begin: int, end: int) -> Excerpt:
        """Tokens [begin, end), as far as the stream has them."""
        parts = [_cut(self._map(index), begin, end) for index in self._files_of(begin, end)]
        if len(parts) == 1:
            return parts[0]
        tokens = [np.empty(0, self._corpus.token_dtype), *(part.tokens for part in parts)]
        starts = [np.empty(0, np.int64), *(part.starts for part in parts)]
        return Excerpt(begin, np.concatenate(tokens), np.concatenate(starts))

    def paths(self, begin: int, end: int) -> list[str]:
        """The files that hold tokens [begin, end)."""
        return [self._paths[index] for index in self._files_of(begin, end)]

    def document_borders(self) -> Iterator[Offsets]:
        """Arrays b of positions: the next len(b) - 1 documents of the stream are tokens [b[i], b[i + 1])."""
        num_documents = 0
        begin_of_last: Offsets = np.empty(0, np.int64)
        for index, file in enumerate(self.files()):
            if index == 0 and len(file.tokens) and file.starts[:1].tolist() != [0]:
                raise ArtifactError(self._explain_damage(index, "its first token begins no document"))
            num_documents += len(file.starts)
            borders = np.append(begin_of_last, file.starts)
            begin_of_last = borders[-1:]
            if len(borders) > 1:
                yield borders
        if num_documents:
            yield np.append(begin_of_last, self.num_tokens)
        if num_documents != self.num_documents:
            found = f"up to its end {num_documents:,} documents begin, the manifest says {self.num_documents:,}"
            raise ArtifactError(self._explain_damage(len(self._paths) - 1, found))

    def _files_of(self, begin: int, end: int) -> range:
        end = min(end, self.num_tokens)
        if begin >= end:
            return range(0)
        return range(bisect_right(self._borders, begin) - 1, bisect_right(self._borders, end - 1))

    def _map(self, index: int) -> Excerpt:
        if self._newest is None or self._newest[0] != index:
            self._newest = index, self._open(index)
        return self._newest[1]

    def _open(self, index: int) -> Excerpt:
        begin, end = self._borders[index], self._borders[index + 1]
        is_tail = index == len(self._paths) - 1
        rows = 1 if is_tail else (end - begin) // self._corpus.sequence_length
        tokens, offsets, places = TokenFile.map(
            self._folder, self._paths[index], self._corpus, rows, num_tokens=end - begin
        )
        row_begins = begin + np.arange(rows, dtype=np.int64) * self._corpus.sequence_length
        starts = np.repeat(row_begins, np.diff(offsets)) + places[offsets[0] : offsets[-1]]
        if len(starts) and not (begin <= starts[0] and starts[-1] < end and np.all(np.diff(starts) > 0)):
            raise ArtifactError(self._explain_damage(index, "its doc_starts do not rise from its begin to its end"))
        return Excerpt(begin, tokens, starts)

    def _explain_damage(self, index: int, found: str) -> str:
        return (
            f"{self._folder / self._paths[index]}: {found}. "
            f"Check the corpus with `python -m services.common.artifacts verify {self._folder}`."
        )


def _cut(file: Excerpt, begin: int, end: int) -> Excerpt:
    low, high = max(begin, file.begin), min(end, file.end)
    first, last = np.searchsorted(file.starts, [low, high])
    return Excerpt(low, file.tokens[low - file.begin : high - file.begin], file.starts[first:last])
