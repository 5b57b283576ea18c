"""Defines corpus/5: packed token rows in Arrow files, from which `token_stream` cuts training samples.

A split of T tokens is one stream of documents, and each document is BOS + tokens + EOS, or tokens + EOS where the
tokenizer has no BOS. Rows of L tokens are in `<split>/shard-*.arrow` (columns `input_ids`, `doc_starts` and `check`),
and the T mod L last tokens in `<split>/tail/tail.arrow`, which has the same columns and one row. The manifest alone
says how many rows each file has, so that nothing is opened to find a row; `corpus_rows` defines the column `check`, by
which a reader trusts a row.
Sample j is tokens [jL, jL + L] inclusive: L inputs, and L targets that are one token further. So there are
floor((T - 1) / L) samples, and no target is lost at the end of a row or of a shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, Phase, RelativePath, Sha256, Xxh3

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
VocabularyKind = Literal["sentencepiece", "tokenizer_json", "tiktoken", "hugging_face"]
BadRowReason = Literal["not JSON", "not an object", "not text", "too long", "not UTF-8", "not rendered"]
MAX_BAD_FILES = 1_000
"""Most files whose bad rows a manifest lists: those with most of them."""


class Vocabulary(ManifestModel):
    kind: VocabularyKind
    path: RelativePath
    """The vocabulary's file. Of a tokenizer of Hugging Face the other files are beside it."""
    sha256: Sha256
    """Hash of the file, or of the names and contents of all files of a tokenizer of Hugging Face."""
    vocab_size: Annotated[int, Field(ge=2, lt=2**32)]
    bos_id: Count | None
    """None where the tokenizer puts no token before a text."""
    eos_id: Count

    @property
    def num_special_tokens(self) -> int:
        """Number of tokens that are stored around a document: BOS, if there is one, and EOS."""
        return 1 + (self.bos_id is not None)


class SplitCounts(ManifestModel):
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the documents."""
    document_tokens: Count
    """Tokens of the documents' text, without BOS and EOS."""
    bos: Count
    eos: Count
    rows: Count
    tail_tokens: Count
    check_digests: tuple[Xxh3, ...]
    """Digest of the column `check` of each shard in order, and then of the tail: see `corpus_rows.digest_checks`."""

    @property
    def tokens(self) -> int:
        return self.document_tokens + self.bos + self.eos

    @model_validator(mode="after")
    def _has_bos_and_eos_of_each_document(self) -> Self:
        if self.documents != self.eos or self.bos not in (0, self.documents):
            raise ValueError(
                f"{self.documents:,} documents, {self.bos:,} BOS and {self.eos:,} EOS, expected equal numbers"
            )
        return self


class SourceSplitCounts(ManifestModel):
    """Counts of the documents of one source in one split."""

    documents: Count
    """Documents in the split; a document that a weight above 1 takes twice counts twice."""
    tokens: Count
    """Tokens in the split, BOS and EOS included."""
    text_bytes: Count
    """UTF-8 bytes of the documents."""


class SourceCounts(ManifestModel):
    """Counts of one source of the recipe."""

    uri: str
    weight: Annotated[float, Field(ge=0)]
    share: Annotated[float, Field(ge=0, le=1)]
    """Share of the training split's tokens."""
    splits: dict[Split, SourceSplitCounts]
    validation_ngrams: Count
    """13-grams of tokens in the source's validation documents, without BOS and EOS. Of a validation split of more than
    262,144 tokens, about so many 13-grams are counted, chosen by hash."""
    validation_ngrams_in_train: Count
    """Number of `validation_ngrams` that a training document of any source has, too."""
    documents_duplicate: Count
    """Documents of this source that were dropped as exact duplicates, of documents of any source."""


class BadFile(ManifestModel):
    """The bad rows of one input file, which were skipped."""

    uri: str
    rows: dict[BadRowReason, Count]
    """Number of bad rows by reason. A row counts once, whatever its source's weight."""
    first: str
    """Place and reason of the first bad row."""

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


class CorpusPayload(ManifestModel):
    vocabulary: Vocabulary
    token_dtype: Literal["uint16", "uint32"]
    sequence_length: Annotated[int, Field(ge=1, lt=2**31)]
    rows_per_shard: Annotated[int, Field(ge=1, lt=2**63)]
    encoder: str
    """Name of the encoder that made the ids."""
    reference: str
    """Name of the library that defines the ids."""
    documents_checked: Count
    """Documents of this corpus and fuzz texts for which encoder and reference gave the same ids."""
    control_text: Literal["text"]
    documents_read: Count
    """Documents of the sources. These counts have a document once, whatever its source's weight."""
    documents_empty: Count
    """Dropped documents without a token."""
    documents_too_short: Count
    """Dropped documents of fewer bytes than `corpus.min_document_bytes`."""
    documents_duplicate: Count
    """Documents that were dropped as exact duplicates of an earlier document; 0 with `corpus.duplicates = "keep"`."""
    documents_not_sampled: Count
    """Documents that a weight below 1 left out."""
    documents_repeated: Count
    """Further copies of documents that weights above 1 put into the training split."""
    documents_with_invalid_utf8: Count
    bad_rows: dict[BadRowReason, Count]
    """Rows that were skipped because they hold no document, by reason. They are none of `documents_read`."""
    bad_files: tuple[BadFile, ...]
    """The files with most bad rows, at most `MAX_BAD_FILES`; the worst one is first."""
    sources: tuple[SourceCounts, ...]
    """Counts of each source in the order of the recipe. A corpus that another program packed may have none."""
    splits: dict[Split, SplitCounts]
    source_code: str
    """Digest of the program that made the corpus, by which a later one tells that it has changed; no part of the id."""
    phases: tuple[Phase, ...]

    @property
    def kept(self) -> Collection[SplitCounts]:
        """Counts of the documents kept, one for each split."""
        return self.splits.values()

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the documents kept."""
        return sum(counts.text_bytes for counts in self.kept)

    @property
    def num_bad_rows(self) -> int:
        return sum(self.bad_rows.values())

    @property
    def validation_ngrams(self) -> int:
        """13-grams of tokens in the validation split; the same field of `SourceCounts` says which."""
        return sum(source.validation_ngrams for source in self.sources)

    @property
    def validation_ngrams_in_train(self) -> int:
        """Number of `validation_ngrams` that a training document has, too."""
        return sum(source.validation_ngrams_in_train for source in self.sources)

    @property
    def validation_ranges(self) -> tuple[range, ...]:
        """Tokens of each source in the validation split, which holds one source after the other, in their order."""
        ends = list(accumulate(source.splits["validation"].tokens for source in self.sources))
        return tuple(map(range, [0, *ends], ends))

    def row_files(self, split: Split) -> Iterator[str]:
        """Yield the paths of the split's shards in the order of their rows, and then that of its tail."""
        for number in range(self.num_shards(split) + 1):
            yield self.row_file(split, number)[0]

    def row_file(self, split: Split, number: int) -> tuple[str, range, int]:
        """Return path, row numbers and number of tokens of a shard; the tail comes after the last shard."""
        counts = self.splits[split]
        if number == self.num_shards(split):
            return tail_path(split), range(counts.rows, counts.rows + 1), counts.tail_tokens
        first = number * self.rows_per_shard
        rows = range(first, min(first + self.rows_per_shard, counts.rows))
        return shard_path(split, number), rows, len(rows) * self.sequence_length

    def num_shards(self, split: Split) -> int:
        """Return the number of the files that `shard_path` names; the tail is one more."""
        return -(-self.splits[split].rows // self.rows_per_shard)

    def without_digests(self) -> Self:
        """Return a copy without the digests of checks, 16 MB for 200,000 shards, which only `verify` compares."""
        splits = {split: counts.model_copy(update={"check_digests": ()}) for split, counts in self.splits.items()}
        return self.model_copy(update={"splits": splits})

    def num_samples(self, split: Split) -> int:
        """Return the number of training samples of a split; the last one takes a token more than its L inputs."""
        return max(0, (self.splits[split].tokens - 1) // self.sequence_length)

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> Self:
        for name, counts in self.splits.items():
            stored = counts.rows * self.sequence_length + counts.tail_tokens
            if counts.bos != (counts.documents if self.vocabulary.bos_id is not None else 0):
                raise ValueError(f"{name}: {counts.bos:,} BOS, and the vocabulary's BOS is {self.vocabulary.bos_id}")
            if counts.tokens != stored:
                raise ValueError(f"{name}: {counts.tokens:,} tokens were encoded and {stored:,} are stored")
            if len(counts.check_digests) != self.num_shards(name) + 1:
                raise ValueError(
                    f"{name}: {counts.rows:,} rows in shards of {self.rows_per_shard:,}, and check_digests of "
                    f"{len(counts.check_digests):,} files"
                )
        kept = sum(counts.documents for counts in self.kept) - self.documents_repeated
        dropped = (
            self.documents_too_short + self.documents_duplicate + self.documents_not_sampled + self.documents_empty
        )
        if kept + dropped != self.documents_read:
            raise ValueError(f"{self.documents_read:,} documents read, {kept:,} kept, {dropped:,} dropped")
        return self

    @model_validator(mode="after")
    def _comes_from_its_sources(self) -> Self:
        for split, counts in self.splits.items() if self.sources else ():
            for what in SourceSplitCounts.model_fields:
                of_sources = sum(getattr(source.splits[split], what) for source in self.sources)
                if of_sources != getattr(counts, what):
                    raise ValueError(f"{split}: the sources have {of_sources:,} {what}, not {getattr(counts, what):,}")
        return self


class CorpusManifest(Manifest):
    SCHEMA: ClassVar[str] = "corpus/5"

    corpus: CorpusPayload

    @model_validator(mode="after")
    def _lists_what_it_is_read_from(self) -> Self:
        rows = (path for split in SPLITS for path in self.corpus.row_files(split))
        self.require_listed([self.corpus.vocabulary.path, *rows])
        return self


def shard_path(split: Split, number: int) -> str:
    """Return the path of a shard. Up to a million shards the names sort as the numbers."""
    return f"{split}/shard-{number:06d}.arrow"


def tail_path(split: Split) -> str:
    """Return the path of the file with the tokens that fill no row."""
    return f"{split}/tail/tail.arrow"


def arrow_schema(token_dtype: str, sequence_length: int) -> pa.Schema:
    token = pa.from_numpy_dtype(np.dtype(token_dtype))
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(pa.field("item", token, nullable=False), sequence_length), nullable=False),
            pa.field("doc_starts", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
            pa.field("check", pa.uint64(), nullable=False),
        ]
    )
