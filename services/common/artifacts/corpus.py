"""corpus/2: packed token rows in Arrow files, and the reader that cuts training samples from them.

A split of T tokens is one stream: document after document, each BOS + tokens + EOS. It is stored as rows
of L tokens in `<split>/shard-*.arrow` (columns `input_ids`, `doc_starts`), and the T mod L last tokens in
`<split>/tail/tail.arrow`. Sample j is tokens [jL, jL + L] inclusive: L inputs and, one further, L targets,
so there are floor((T - 1) / L) samples and no target is lost at a row's or a shard's end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator

from services.common.artifacts.manifest import Count, Manifest, Phase, Record, Sha256
from services.common.errors import ArtifactError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


class Vocabulary(Record):
    kind: Literal["sentencepiece", "tokenizer_json", "tiktoken"]
    path: str
    """The file, relative to the artifact's folder."""
    sha256: Sha256
    vocab_size: Annotated[int, Field(ge=2)]
    bos_id: Count
    eos_id: Count


class SplitCounts(Record):
    documents: Count
    document_tokens: Count
    """Tokens of the documents' text, without BOS and EOS."""
    bos: Count
    eos: Count
    rows: Count
    tail_tokens: Count
    shards: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.document_tokens + self.bos + self.eos


class SourceCounts(Record):
    """What a source of the recipe became."""

    uri: str
    weight: float
    documents: Count
    """Kept, once for each time that a weight above 1 keeps them."""
    tokens: Count
    """With BOS and EOS."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Of the corpus's tokens."""


class CorpusPayload(Record):
    vocabulary: Vocabulary
    token_dtype: Literal["uint16", "uint32"]
    sequence_length: Annotated[int, Field(ge=1)]
    rows_per_shard: Annotated[int, Field(ge=1)]
    encoder: str
    """What made the ids."""
    reference: str
    """The library that defines them."""
    documents_checked: Count
    """Encoded by both, with the same ids: documents of this corpus, and fuzz."""
    control_text: Literal["text"]
    documents_read: Count
    """Once for each time that a source's weight above 1 reads them."""
    documents_empty: Count
    """Documents without a token, dropped."""
    documents_too_short: Count
    documents_not_sampled: Count
    """Left out by their source's weight."""
    documents_with_invalid_utf8: Count
    sources: tuple[SourceCounts, ...]
    text_bytes: Count
    """UTF-8 bytes of the documents that were kept."""
    splits: dict[Split, SplitCounts]
    phases: tuple[Phase, ...]

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> Self:
        for name, counts in self.splits.items():
            stored = counts.rows * self.sequence_length + counts.tail_tokens
            if counts.tokens != stored:
                raise ValueError(f"{name}: {counts.tokens:,} tokens were encoded and {stored:,} are stored")
        kept = sum(counts.documents for counts in self.splits.values())
        dropped = self.documents_empty + self.documents_too_short + self.documents_not_sampled
        if kept + dropped != self.documents_read:
            raise ValueError(f"{self.documents_read:,} documents read, {kept:,} kept, {dropped:,} dropped")
        return self


class CorpusManifest(Manifest):
    SCHEMA: ClassVar[str] = "corpus/2"

    corpus: CorpusPayload

    @classmethod
    def upgrade(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """corpus/1 had no other encoder than SentencePiece, and took every document of every source."""
        if raw["schema"] != "corpus/1":
            return raw
        payload = raw["corpus"]
        younger = {
            "encoder": "sentencepiece",
            "reference": "sentencepiece",
            "documents_checked": 0,
            "control_text": "text",
            "documents_too_short": 0,
            "documents_not_sampled": 0,
            "sources": (),
        }
        return {**raw, "schema": cls.SCHEMA, "corpus": {**younger, **payload}}


class TokenStream:
    """Random access to the samples of one split; shards stay memory-mapped, nothing is read ahead."""

    def __init__(self, folder: Path, corpus: CorpusPayload, split: Split) -> None:
        counts = corpus.splits[split]
        self.sequence_length = corpus.sequence_length
        self.num_samples = max(0, (counts.tokens - 1) // corpus.sequence_length)
        self._rows_per_shard = corpus.rows_per_shard
        self._shards = [_map_rows(folder / path, corpus.sequence_length) for path in counts.shards]
        self._tail = read_tail(folder / split / "tail" / "tail.arrow")

    def read(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Samples as int64 [len(indices), L + 1]; columns [:-1] are inputs and [1:] the targets."""
        wanted = np.asarray(indices, dtype=np.int64)
        samples = np.empty((len(wanted), self.sequence_length + 1), dtype=np.int64)
        for position, index in enumerate(wanted.tolist()):
            shard, row = divmod(index, self._rows_per_shard)
            samples[position, :-1] = self._shards[shard][row]
            samples[position, -1] = self._token_after(shard, row)
        return samples

    def _token_after(self, shard: int, row: int) -> Any:
        if row + 1 < len(self._shards[shard]):
            return self._shards[shard][row + 1, 0]
        if shard + 1 < len(self._shards):
            return self._shards[shard + 1][0, 0]
        return self._tail[0]


def arrow_schema(token_dtype: str, sequence_length: int) -> pa.Schema:
    token = pa.from_numpy_dtype(np.dtype(token_dtype))
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(pa.field("item", token, nullable=False), sequence_length), nullable=False),
            pa.field("doc_starts", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        ]
    )


def read_tail(path: Path) -> npt.NDArray[np.integer[Any]]:
    """The last tokens of a split, fewer than a row."""
    tokens = _open_arrow(path).column("input_ids").chunk(0).values
    return np.asarray(tokens.to_numpy(zero_copy_only=True))


def _map_rows(path: Path, sequence_length: int) -> npt.NDArray[np.integer[Any]]:
    """The rows of a shard as a read-only view [rows, L] of the mapped file."""
    rows = _open_arrow(path).column("input_ids").chunk(0)
    return np.asarray(rows.values.to_numpy(zero_copy_only=True)).reshape(-1, sequence_length)


def _open_arrow(path: Path) -> pa.Table:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path), "r")).read_all()
    except (pa.ArrowInvalid, FileNotFoundError) as error:
        raise ArtifactError(
            f"{path}: cannot be read as an Arrow file: {error}. "
            f"Check the corpus with `python -m services.common.artifacts verify {path.parents[1]}`."
        ) from error
