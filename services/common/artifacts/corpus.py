"""Defines corpus/4: packed token rows in Arrow files, from which `token_stream` cuts training samples.

A split of T tokens is one stream of documents, and each document is BOS + tokens + EOS. Rows of L tokens are in
`<split>/shard-*.arrow` (columns `input_ids`, `doc_starts` and `check`), and the T mod L last tokens in
`<split>/tail/tail.arrow`, which has the same columns and one row. The manifest alone says how many rows each file has,
so that nothing is opened to find a row; `row_check` defines the column `check`, by which a reader trusts a row.
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

from services.common.artifacts.manifest import (
    Count,
    Manifest,
    ManifestModel,
    Many,
    Phase,
    RelativePath,
    Sha256,
    Text,
    Xxh3,
)
from services.common.input.problem_list import list_names

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
VocabularyKind = Literal["sentencepiece", "tokenizer_json", "tiktoken"]
BadRowReason = Literal["not JSON", "not an object", "not text", "too long", "not UTF-8"]
MAX_BAD_FILES = 1_000
"""Most files whose bad rows a manifest lists: those with most of them."""


class Vocabulary(ManifestModel):
    kind: VocabularyKind
    path: RelativePath
    sha256: Sha256
    vocab_size: Annotated[int, Field(ge=2, lt=2**32)]
    bos_id: Count
    eos_id: Count

    @model_validator(mode="after")
    def _has_its_borders(self) -> Self:
        if max(self.bos_id, self.eos_id) >= self.vocab_size:
            raise ValueError(
                f"bos_id {self.bos_id:,} or eos_id {self.eos_id:,} is not below vocab_size {self.vocab_size:,}"
            )
        return self


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
    check_digests: Many[Xxh3]
    """Digest of the column `check` of each shard in order, and then of the tail: see `row_check.digest_checks`."""

    @property
    def tokens(self) -> int:
        return self.document_tokens + self.bos + self.eos

    @model_validator(mode="after")
    def _has_borders_around_each_document(self) -> Self:
        if not self.documents == self.bos == self.eos:
            raise ValueError(
                f"{self.documents:,} documents with {self.bos:,} BOS and {self.eos:,} EOS, expected one of each around "
                f"every document"
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

    uri: Text
    weight: Annotated[float, Field(ge=0)]
    share: Annotated[float, Field(ge=0, le=1)]
    """Share of the training split's tokens."""
    splits: dict[Split, SourceSplitCounts]
    validation_ngrams: Count
    """13-grams of tokens in the source's validation documents, without BOS and EOS. One that is there twice counts
    twice. Of a validation split of more than 262,144 tokens, about so many 13-grams are counted, chosen by hash.
    """
    validation_ngrams_in_train: Count
    """Number of `validation_ngrams` that a training document of any source has, too."""
    documents_duplicate: Count
    """Documents of this source that were dropped as exact duplicates, of documents of any source."""

    @model_validator(mode="after")
    def _has_both_splits(self) -> Self:
        _require_splits(self.splits)
        if self.validation_ngrams_in_train > self.validation_ngrams:
            raise ValueError(
                f"{self.validation_ngrams_in_train:,} of {self.validation_ngrams:,} validation n-grams are in train"
            )
        return self


class BadFile(ManifestModel):
    """The bad rows of one input file, which were skipped."""

    uri: Text
    rows: dict[BadRowReason, Count]
    """Number of bad rows by reason. A row counts once, whatever its source's weight."""
    first: Text
    """Place and reason of the first bad row."""

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())


class CorpusPayload(ManifestModel):
    vocabulary: Vocabulary
    token_dtype: Literal["uint16", "uint32"]
    sequence_length: Annotated[int, Field(ge=1, lt=2**31)]
    rows_per_shard: Annotated[int, Field(ge=1, lt=2**63)]
    encoder: Text
    """Name of the encoder that made the ids."""
    reference: Text
    """Name of the library that defines the ids."""
    documents_checked: Count
    """Documents of this corpus and fuzz texts for which encoder and reference gave the same ids."""
    control_text: Literal["text"]
    documents_read: Count
    """Documents read; one that a source's weight above 1 takes twice counts twice."""
    documents_empty: Count
    """Dropped documents without a token."""
    documents_too_short: Count
    """Dropped documents of fewer bytes than `corpus.min_document_bytes`."""
    documents_duplicate: Count
    """Documents that were dropped as exact duplicates of an earlier document; 0 with `corpus.duplicates = "keep"`."""
    documents_not_sampled: Count
    """Documents that a pass over their source left out: those beyond the source's weight, and those of the validation
    split in each pass but the first.
    """
    documents_with_invalid_utf8: Count
    bad_rows: dict[BadRowReason, Count]
    """Rows that were skipped because they hold no document, by reason. They are none of `documents_read`."""
    bad_files: Many[BadFile]
    """The files with most bad rows, at most `MAX_BAD_FILES`; the worst one is first."""
    sources: Many[SourceCounts]
    """Counts of each source in the order of the recipe. A corpus that another program packed may have none."""
    splits: dict[Split, SplitCounts]
    phases: Many[Phase]

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
        """Tokens of each source in the validation split's token stream, in the order of `sources`.

        The split holds one source after the other, because a document is in it once, whatever its source's weight.
        """
        ends = list(accumulate(source.splits["validation"].tokens for source in self.sources))
        return tuple(map(range, [0, *ends], ends))

    def row_files(self, split: Split) -> Iterator[str]:
        """Yield the paths of the split's shards in the order of their rows, and then that of its tail."""
        for number in range(self.num_shards(split)):
            yield shard_path(split, number)
        yield tail_path(split)

    def num_shards(self, split: Split) -> int:
        """Return the number of the files that `shard_path` names; the tail is one more."""
        return -(-self.splits[split].rows // self.rows_per_shard)

    def without_digests(self) -> Self:
        """Return a copy without the digests of checks, which only a verification of the whole corpus compares.

        The copy has the same size for a corpus of any number of shards; the digests of 200,000 take 16 MB.
        """
        splits = {split: counts.model_copy(update={"check_digests": ()}) for split, counts in self.splits.items()}
        return self.model_copy(update={"splits": splits})

    def rows_of_shard(self, split: Split, number: int) -> range:
        """Return the numbers in the split of the rows that a shard has."""
        rows, first = self.splits[split].rows, number * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, rows))

    def num_samples(self, split: Split) -> int:
        """Return the number of training samples of a split; the last one takes a token more than its L inputs."""
        return max(0, (self.splits[split].tokens - 1) // self.sequence_length)

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> Self:
        _require_splits(self.splits)
        for name, counts in self.splits.items():
            stored = counts.rows * self.sequence_length + counts.tail_tokens
            if counts.tokens != stored:
                raise ValueError(f"{name}: {counts.tokens:,} tokens were encoded and {stored:,} are stored")
            if len(counts.check_digests) != self.num_shards(name) + 1:
                raise ValueError(
                    f"{name}: {counts.rows:,} rows in shards of {self.rows_per_shard:,}, and check_digests of "
                    f"{len(counts.check_digests):,} files"
                )
        kept = sum(counts.documents for counts in self.kept)
        dropped = (
            self.documents_too_short + self.documents_duplicate + self.documents_not_sampled + self.documents_empty
        )
        if kept + dropped != self.documents_read:
            raise ValueError(f"{self.documents_read:,} documents read, {kept:,} kept, {dropped:,} dropped")
        listed = sum(file.num_rows for file in self.bad_files)
        if listed > self.num_bad_rows or (len(self.bad_files) < MAX_BAD_FILES and listed < self.num_bad_rows):
            raise ValueError(f"{self.num_bad_rows:,} bad rows were skipped, {listed:,} in `bad_files`")
        if self.documents_with_invalid_utf8 > self.documents_read:
            raise ValueError(
                f"{self.documents_with_invalid_utf8:,} of {self.documents_read:,} documents with invalid UTF-8"
            )
        return self

    @model_validator(mode="after")
    def _comes_from_its_sources(self) -> Self:
        """Compare each split's counts, and the number of duplicates, with the sums over the sources."""
        if not self.sources:
            return self
        duplicates = sum(source.documents_duplicate for source in self.sources)
        if duplicates != self.documents_duplicate:
            raise ValueError(
                f"the sources have {duplicates:,} exact duplicates, the corpus has {self.documents_duplicate:,}"
            )
        for split, counts in self.splits.items():
            for what in SourceSplitCounts.model_fields:
                of_sources = sum(getattr(source.splits[split], what) for source in self.sources)
                if of_sources != getattr(counts, what):
                    raise ValueError(
                        f"{split}: the sources have {of_sources:,} {what}, the split has {getattr(counts, what):,}"
                    )
        return self

    @model_validator(mode="after")
    def _has_room_for_its_ids(self) -> Self:
        if self.vocabulary.vocab_size - 1 > np.iinfo(self.token_dtype).max:
            raise ValueError(f"{self.vocabulary.vocab_size:,} ids do not fit into {self.token_dtype}")
        return self


class CorpusManifest(Manifest):
    SCHEMA: ClassVar[str] = "corpus/4"

    corpus: CorpusPayload

    @model_validator(mode="after")
    def _lists_what_it_is_read_from(self) -> Self:
        vocabulary = self.corpus.vocabulary
        files = [path for split in SPLITS for path in self.corpus.row_files(split)]
        if vocabulary.path in files:
            raise ValueError(f"{vocabulary.path}: named both as the vocabulary and as a file of rows")
        self.require_listed([vocabulary.path, *files])
        [listed] = [entry for entry in self.files if entry.path == vocabulary.path]
        if listed.sha256 != vocabulary.sha256:
            raise ValueError(f"{vocabulary.path}: sha256 {vocabulary.sha256[:12]}, `files` has {listed.sha256[:12]}")
        return self

    @model_validator(mode="after")
    def _is_what_its_recipe_asks_for(self) -> Self:
        asked = self.recipe.get("corpus")
        if self.corpus.sources:
            made_of = [(each.uri, each.weight) for each in self.corpus.sources]
            wanted = [
                (each.get("uri"), each.get("weight", 1.0)) if isinstance(each, dict) else each
                for each in (asked.get("sources") or () if isinstance(asked, dict) else ())
            ]
            if made_of != wanted:
                raise ValueError(
                    f"sources {list_names(map(str, made_of))}, the recipe asks for {list_names(map(str, wanted))}"
                )
        for name in ("sequence_length", "rows_per_shard"):
            made = getattr(self.corpus, name)
            if not isinstance(asked, dict) or asked.get(name) != made:
                got = asked.get(name) if isinstance(asked, dict) else None
                raise ValueError(f"corpus.{name}: {made:,}, the recipe asks for {got}")
        if self.corpus.documents_duplicate and (not isinstance(asked, dict) or asked.get("duplicates") != "drop"):
            raise ValueError(
                f"{self.corpus.documents_duplicate:,} exact duplicates were dropped, the recipe asks to keep them"
            )
        if self.corpus.bad_rows and (not isinstance(asked, dict) or asked.get("bad_rows") != "skip"):
            raise ValueError(f"{self.corpus.num_bad_rows:,} bad rows were skipped, the recipe asks to stop at them")
        return self


def _require_splits(splits: Collection[Split]) -> None:
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits: {', '.join(splits) or 'none'}, expected {' and '.join(SPLITS)}")


def shard_path(split: Split, number: int) -> str:
    """Return the path of a shard. The order of the names is that of the numbers for as many as a manifest can list."""
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
