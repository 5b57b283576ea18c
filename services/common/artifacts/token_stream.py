"""Reads training samples from a corpus: random access to memory-mapped shards, one copy, which widens."""

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
    """Samples and where in them documents are, for masks that keep attention within a document.

    Both arrays are of the L inputs. A document that began before the sample counts from the sample's begin: what was
    before it cannot be attended to anyway.
    """

    tokens: npt.NDArray[np.int64]
    """[n, L + 1]"""
    segment_ids: npt.NDArray[np.int32]
    """[n, L] number of the document in the sample, from 0."""
    positions: npt.NDArray[np.int32]
    """[n, L] distance from the document's begin, from 0."""


class TokenStream:
    """Random access to the samples of one split; shards stay memory-mapped, nothing is read ahead."""

    def __init__(self, folder: Path, corpus: CorpusPayload, split: Split) -> None:
        """Raises `ArtifactError` when a file does not hold what the manifest says, checksums aside."""
        counts = corpus.splits[split]
        self.sequence_length = corpus.sequence_length
        self.num_samples = corpus.num_samples(split)
        self._folder, self._paths = folder, counts.shards
        self._vocab_size = corpus.vocabulary.vocab_size
        self._rows_per_shard = corpus.rows_per_shard
        *self._shards, tail = map_files(folder, corpus, split)
        # What follows the last token of each shard.
        self._tokens_after = [file.tokens[:1] for file in (*self._shards[1:], tail)]

    @classmethod
    def open(cls, artifact: Artifact[CorpusManifest], split: Split, *, verify: Level = "full") -> TokenStream:
        """Check the split's files before anything is read from them: their checksums, or their sizes alone.

        Raises `ArtifactError` that names what is damaged.
        """
        manifest = artifact.manifest
        paths = {*manifest.corpus.splits[split].shards, tail_path(split)}
        verify_files(artifact.path, manifest, level=verify, paths=paths)
        return cls(artifact.path, manifest.corpus, split)

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Samples as int64 [len(indices), L + 1]; columns [:-1] are inputs and [1:] the targets.

        Raises `ArtifactError` for an id that is not in the vocabulary: a compiled graph reads whatever is there.
        """
        wanted = np.asarray(indices, dtype=np.int64).tolist()
        length, rows_per_shard, shards = self.sequence_length, self._rows_per_shard, self._shards
        samples = np.empty((len(wanted), length + 1), dtype=np.int64)
        for position, index in enumerate(wanted):
            shard, row = divmod(index, rows_per_shard)
            tokens = shards[shard].tokens
            begin = row * length
            if begin + length < len(tokens):
                samples[position] = tokens[begin : begin + length + 1]
            else:
                samples[position, :-1] = tokens[begin:]
                samples[position, -1:] = self._tokens_after[shard]
        if len(wanted) and (largest := int(samples.max())) >= self._vocab_size:
            shard = wanted[int(samples.max(axis=1).argmax())] // rows_per_shard
            raise explain_foreign_id(self._folder / self._paths[shard], largest, self._vocab_size)
        return samples

    def read_documents(self, indices: npt.ArrayLike) -> DocumentBatch:
        """Samples as `read` gives them, with the documents in them."""
        wanted, length = np.asarray(indices, dtype=np.int64), self.sequence_length
        segment_ids, positions = (np.empty((len(wanted), length), np.int32) for _ in range(2))
        places = np.arange(length, dtype=np.int32)
        for position, index in enumerate(wanted.tolist()):
            shard, row = divmod(index, self._rows_per_shard)
            starts = self._shards[shard].doc_starts(row)
            if len(starts) and (starts[0] < 0 or starts[-1] >= length or np.any(np.diff(starts) <= 0)):
                raise ArtifactError(
                    f"{self._folder / self._paths[shard]}: the doc_starts of row {row:,} do not rise within the row. "
                    f"{_check(self._folder)}"
                )
            starts = np.concatenate(([0], starts[starts > 0]))
            sizes = np.diff(starts, append=length)
            segment_ids[position] = np.repeat(np.arange(len(starts)), sizes)
            positions[position] = places - np.repeat(starts, sizes)
        return DocumentBatch(self.read(wanted), segment_ids, positions)


def map_files(folder: Path, corpus: CorpusPayload, split: Split) -> Iterator[TokenFile]:
    """The shards of a split and its tail, mapped one after the other: who keeps none of them needs one map at a time.

    Raises `ArtifactError` when a file does not hold what the manifest says, checksums aside; `LimitError` or `TryAgain`
    when one cannot be mapped for want of maps, memory or descriptors, which says nothing about what it holds.
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
    """Read all tokens of a corpus. Raises `ArtifactError` as `map_files` does, and for an id that no token has."""
    vocab_size = corpus.vocabulary.vocab_size
    for split in SPLITS:
        paths = (*corpus.splits[split].shards, tail_path(split))
        for path, file in zip(paths, map_files(folder, corpus, split), strict=True):
            if len(file.tokens) and (largest := int(file.tokens.max())) >= vocab_size:
                raise explain_foreign_id(folder / path, largest, vocab_size)


def explain_foreign_id(path: Path, largest: int, vocab_size: int) -> ArtifactError:
    """The error of a file that holds an id which is not in the vocabulary."""
    return ArtifactError(
        f"{path}: holds the id {largest:,}, and its vocabulary has {vocab_size:,}. Move the corpus away and run the "
        f"tokenizer stage to make it anew."
    )


class TokenFile(NamedTuple):
    """Read-only views of a mapped file: a shard, or a tail."""

    tokens: Tokens
    """[rows * L], or the tail's own length"""
    start_offsets: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]

    @classmethod
    def map(cls, folder: Path, path: str, corpus: CorpusPayload, rows: int, num_tokens: int | None = None) -> TokenFile:
        """The file at `path` of a corpus's manifest, with `rows` rows of L tokens, or of `num_tokens` in all.

        Raises `ArtifactError` when the file is another one, and as `map_files` does where it cannot be mapped.
        Checksums are not looked at.
        """
        file = locate(folder, path)
        expected = rows * corpus.sequence_length if num_tokens is None else num_tokens
        try:
            batch = _read_batch(file)
            doc_starts = batch.column("doc_starts")
            tokens = _view(batch.column("input_ids").values)
            found = cls(tokens, start_offsets=_view(doc_starts.offsets), starts=_view(doc_starts.values))
        except (pa.ArrowException, OSError, KeyError, AttributeError, MemoryError) as error:
            # While the files before it are mapped, which is what can use up a limit.
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
    """The one record batch of a file: views of the mapped file, checked not to point outside of it."""
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
