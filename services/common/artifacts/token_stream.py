"""Reads training samples at random from the memory-mapped shards of a corpus, with one copy, which widens the ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.common.artifacts.corpus import SPLITS, CorpusManifest, CorpusPayload, Split, tail_path
from services.common.artifacts.files import Level, locate, verify_files
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.process.limits import explain_lack

Tokens = npt.NDArray[np.integer[Any]]


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


class TokenStream:
    """Gives random access to the samples of one split. Shards stay memory-mapped, and nothing is read ahead.

    Training reads the samples below `num_samples`. An evaluation reads those below `num_padded_samples`: the last of
    them may be padded, so that together they have each target of the split once.
    """

    def __init__(self, folder: Path, corpus: CorpusPayload, split: Split) -> None:
        """Raises `ArtifactError` where a file contradicts the manifest; checksums are not compared."""
        counts = corpus.splits[split]
        self.sequence_length = corpus.sequence_length
        self.num_samples = corpus.num_samples(split)
        self.num_tokens = counts.tokens
        self.num_padded_samples = -(-max(0, counts.tokens - 1) // corpus.sequence_length)
        self.num_rows = counts.rows
        self._folder, self._split, self._paths = folder, split, counts.shards
        self._vocab_size = corpus.vocabulary.vocab_size
        self._rows_per_shard = corpus.rows_per_shard
        *self._shards, self._tail = map_files(folder, corpus, split)
        # What follows the last token of each shard.
        self._tokens_after = [file.tokens[:1] for file in (*self._shards[1:], self._tail)]

    @classmethod
    def open(cls, artifact: Artifact[CorpusManifest], split: Split, *, verify: Level = "full") -> TokenStream:
        """Open a split once its files have passed `verify_files` at the level `verify`.

        Raises `ArtifactError` that names the damaged files.
        """
        manifest = artifact.manifest
        paths = {*manifest.corpus.splits[split].shards, tail_path(split)}
        verify_files(artifact.path, manifest, level=verify, paths=paths)
        return cls(artifact.path, manifest.corpus, split)

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return samples as int64 [len(indices), L + 1]; columns [:-1] are the inputs and [1:] the targets.

        A padded sample ends with the id 0. Raises `ArtifactError` for an id outside the vocabulary, with which a
        compiled graph would read foreign memory.
        """
        wanted = np.asarray(indices, dtype=np.int64).tolist()
        length = self.sequence_length
        samples = np.zeros((len(wanted), length + 1), dtype=np.int64)
        for position, index in enumerate(wanted):
            file, row, after = self._find(index)
            tokens = file.tokens[row * length : (row + 1) * length + 1]
            samples[position, : len(tokens)] = tokens
            if len(tokens) == length:
                samples[position, length : length + len(after)] = after
        if len(wanted) and (largest := int(samples.max())) >= self._vocab_size:
            path = self._path(wanted[int(samples.max(axis=1).argmax())])
            raise explain_foreign_id(path, largest, self._vocab_size)
        return samples

    def read_documents(self, indices: npt.ArrayLike) -> DocumentBatch:
        """Return samples as `read` does, with the documents in them."""
        wanted, length = np.asarray(indices, dtype=np.int64), self.sequence_length
        segment_ids, positions = (np.empty((len(wanted), length), np.int32) for _ in range(2))
        places = np.arange(length, dtype=np.int32)
        for position, index in enumerate(wanted.tolist()):
            starts = self._document_starts(index)
            starts = np.concatenate(([0], starts[starts > 0]))
            sizes = np.diff(starts, append=length)
            segment_ids[position] = np.repeat(np.arange(len(starts)), sizes)
            positions[position] = places - np.repeat(starts, sizes)
        return DocumentBatch(self.read(wanted), segment_ids, positions)

    def document_begins(self) -> npt.NDArray[np.int64]:
        """Return the positions in the split at which its documents begin, in ascending order: 8 bytes a document.

        Raises `ArtifactError` where the positions in the files do not rise from 0 to the end of the split.
        """
        begins, first_token = [], 0
        for file in (*self._shards, self._tail):
            offsets = file.start_offsets
            rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            begins.append(first_token + rows * self.sequence_length + file.starts[offsets[0] : offsets[-1]])
            first_token += len(file.tokens)
        found = np.concatenate(begins)
        if self.num_tokens and (
            not len(found) or found[0] != 0 or found[-1] >= self.num_tokens or np.any(np.diff(found) <= 0)
        ):
            raise ArtifactError(
                f"{self._folder / self._split}: the doc_starts of its rows do not rise from 0 to the split's end. "
                f"{_check(self._folder)}"
            )
        return found

    def _document_starts(self, index: int) -> npt.NDArray[np.int32]:
        file, row, _ = self._find(index)
        starts, length = file.doc_starts(row), self.sequence_length
        if len(starts) and (starts[0] < 0 or starts[-1] >= length or np.any(np.diff(starts) <= 0)):
            raise ArtifactError(
                f"{self._path(index)}: the doc_starts of row {row:,} do not rise within the row. {_check(self._folder)}"
            )
        return starts

    def _find(self, index: int) -> tuple[TokenFile, int, Tokens]:
        """Return the file of a sample, the sample's row in it, and the first token after the file."""
        shard, row = divmod(index, self._rows_per_shard)
        if index == self.num_rows:
            return self._tail, 0, self._tail.tokens[:0]
        return self._shards[shard], row, self._tokens_after[shard]

    def _path(self, index: int) -> Path:
        name = tail_path(self._split) if index == self.num_rows else self._paths[index // self._rows_per_shard]
        return self._folder / name


def map_files(folder: Path, corpus: CorpusPayload, split: Split) -> Iterator[TokenFile]:
    """Map the shards of a split and then its tail. A caller that keeps none of them needs one map at a time.

    Raises `ArtifactError` where a file contradicts the manifest (checksums are not compared), and `LimitError` or
    `TryAgain` for lack of maps, memory or descriptors, which says nothing about the file.
    """
    counts, documents = corpus.splits[split], 0
    first_rows = range(0, counts.rows, corpus.rows_per_shard)
    for path, first_row in zip(counts.shards, first_rows, strict=True):
        shard = TokenFile.map(folder, path, corpus, rows=min(corpus.rows_per_shard, counts.rows - first_row))
        documents += len(shard.starts)
        yield shard
    tail = TokenFile.map(folder, tail_path(split), corpus, rows=1, num_tokens=counts.tail_tokens)
    documents += len(tail.starts)
    if documents != counts.documents:
        raise ArtifactError(
            f"{folder / split}: {documents:,} documents begin in its files, the manifest says {counts.documents:,}. "
            f"{_check(folder)}"
        )
    yield tail


def verify_ids(folder: Path, corpus: CorpusPayload) -> None:
    """Read all tokens of a corpus. Raises `ArtifactError` as `map_files` does, and for an id outside the vocabulary."""
    vocab_size = corpus.vocabulary.vocab_size
    for split in SPLITS:
        paths = (*corpus.splits[split].shards, tail_path(split))
        for path, file in zip(paths, map_files(folder, corpus, split), strict=True):
            if len(file.tokens) and (largest := int(file.tokens.max())) >= vocab_size:
                raise explain_foreign_id(folder / path, largest, vocab_size)


def explain_foreign_id(path: Path, largest: int, vocab_size: int) -> ArtifactError:
    """Return the error for a file with an id outside the vocabulary."""
    return ArtifactError(
        f"{path}: has the id {largest:,}, and its vocabulary has {vocab_size:,} ids. Move the corpus away and run the "
        f"tokenizer stage to make it anew."
    )


class TokenFile(NamedTuple):
    """Read-only views of a mapped shard or tail."""

    tokens: Tokens
    """[rows * L], or the tail's own length"""
    start_offsets: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]

    @classmethod
    def map(cls, folder: Path, path: str, corpus: CorpusPayload, rows: int, num_tokens: int | None = None) -> TokenFile:
        """Map the file at `path` of a corpus, which must have `rows` rows and, unless `num_tokens` says otherwise, L
        tokens in each.

        Raises the same errors as `map_files`.
        """
        file = locate(folder, path)
        expected = rows * corpus.sequence_length if num_tokens is None else num_tokens
        try:
            batch = _read_batch(file)
            doc_starts = batch.column("doc_starts")
            tokens = _view(batch.column("input_ids").values)
            found = cls(tokens, start_offsets=_view(doc_starts.offsets), starts=_view(doc_starts.values))
        except (pa.ArrowException, OSError, KeyError, AttributeError, MemoryError) as error:
            # The files mapped before this one are what can use up a limit.
            num_files = sum(len(counts.shards) + 1 for counts in corpus.splits.values())
            raise explain_lack(error, file, num_files) or ArtifactError(
                f"{file}: cannot be read as a corpus's file: {error}. {_check(folder)}"
            ) from error
        if (len(tokens), tokens.dtype, len(batch)) != (expected, np.dtype(corpus.token_dtype), rows):
            raise ArtifactError(
                f"{file}: {len(tokens):,} tokens of {tokens.dtype} in {len(batch):,} rows, the manifest says "
                f"{expected:,} of {corpus.token_dtype} in {rows:,}. {_check(folder)}"
            )
        if found.starts.dtype != np.int32:
            raise ArtifactError(f"{file}: doc_starts are {found.starts.dtype}, expected int32. {_check(folder)}")
        return found

    def doc_starts(self, row: int) -> npt.NDArray[np.int32]:
        """Positions in the row at which documents begin."""
        return self.starts[self.start_offsets[row] : self.start_offsets[row + 1]]


def _read_batch(path: Path) -> pa.RecordBatch:
    """Return the only record batch of a file. Its views were checked not to point outside the mapped file."""
    with pa.ipc.open_file(pa.memory_map(str(path), "r")) as file:
        if file.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{file.num_record_batches} record batches, expected 1")
        batch = file.get_batch(0)
    batch.validate(full=True)
    if any(column.null_count for column in batch.columns):
        raise pa.ArrowInvalid("it has nulls")
    return batch


def _view(values: pa.Array) -> Any:
    return np.from_dlpack(values)  # a view; `to_numpy` imports pandas where that is installed: 0.4 s


def _check(folder: Path) -> str:
    return f"Check the corpus with `python -m services.common.artifacts verify {folder}`."
