"""Reads training samples from a corpus: random access to memory-mapped shards, one copy, which widens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.common.artifacts.corpus import CorpusManifest, CorpusPayload, Split
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError

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
        counts = corpus.splits[split]
        self.sequence_length = corpus.sequence_length
        self.num_samples = max(0, (counts.tokens - 1) // corpus.sequence_length)
        self._rows_per_shard = corpus.rows_per_shard
        self._shards = [_Shard.map(folder / path) for path in counts.shards]
        # What follows the last token of each shard.
        firsts = [shard.tokens for shard in self._shards[1:]] + [read_tail(folder / split / "tail" / "tail.arrow")]
        self._tokens_after = [tokens[:1] for tokens in firsts]

    @classmethod
    def open(
        cls, artifact: Artifact[CorpusManifest], split: Split, *, verify: Literal["full", "size"] = "full"
    ) -> TokenStream:
        """Check the split's files before anything is read from them: their checksums, or their sizes alone.

        Raises `ArtifactError` that names what is damaged.
        """
        manifest = artifact.manifest
        paths = {entry.path for entry in manifest.files if entry.path.startswith(f"{split}/")}
        verify_files(artifact.path, manifest, level=verify, paths=paths)
        return cls(artifact.path, manifest.corpus, split)

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Samples as int64 [len(indices), L + 1]; columns [:-1] are inputs and [1:] the targets."""
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
        return samples

    def read_documents(self, indices: npt.ArrayLike) -> DocumentBatch:
        """Samples as `read` gives them, with the documents in them."""
        wanted, length = np.asarray(indices, dtype=np.int64), self.sequence_length
        segment_ids, positions = (np.empty((len(wanted), length), np.int32) for _ in range(2))
        places = np.arange(length, dtype=np.int32)
        for position, index in enumerate(wanted.tolist()):
            shard, row = divmod(index, self._rows_per_shard)
            starts = self._shards[shard].doc_starts(row)
            starts = np.concatenate(([0], starts[starts > 0]))
            sizes = np.diff(starts, append=length)
            segment_ids[position] = np.repeat(np.arange(len(starts)), sizes)
            positions[position] = places - np.repeat(starts, sizes)
        return DocumentBatch(self.read(wanted), segment_ids, positions)


class _Shard(NamedTuple):
    """Read-only views of a mapped file."""

    tokens: Tokens
    """[rows * L]"""
    start_offsets: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]

    @classmethod
    def map(cls, path: Path) -> _Shard:
        rows = _open_arrow(path)
        doc_starts = rows.column("doc_starts").chunk(0)
        return cls(
            tokens=_view(rows.column("input_ids").chunk(0).values),
            start_offsets=_view(doc_starts.offsets),
            starts=_view(doc_starts.values),
        )

    def doc_starts(self, row: int) -> npt.NDArray[np.int32]:
        """Positions in the row at which documents begin."""
        return self.starts[self.start_offsets[row] : self.start_offsets[row + 1]]


def read_tail(path: Path) -> Tokens:
    """The last tokens of a split, fewer than a row."""
    return _view(_open_arrow(path).column("input_ids").chunk(0).values)


def _view(values: pa.Array) -> Any:
    return np.asarray(values.to_numpy(zero_copy_only=True))


def _open_arrow(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path), "r")).read_all()
    except (pa.ArrowInvalid, FileNotFoundError) as error:
        raise ArtifactError(
            f"{path}: cannot be read as an Arrow file: {error}. "
            f"Check the corpus with `python -m services.common.artifacts verify {path.parents[1]}`."
        ) from error
