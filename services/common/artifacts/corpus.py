"""corpus/2: packed token rows in Arrow files; `token_stream` cuts training samples from them.

A split of T tokens is one stream: document after document, each BOS + tokens + EOS. It is stored as rows
of L tokens in `<split>/shard-*.arrow` (columns `input_ids`, `doc_starts`), and the T mod L last tokens in
`<split>/tail/tail.arrow`. Sample j is tokens [jL, jL + L] inclusive: L inputs and, one further, L targets,
so there are floor((T - 1) / L) samples and no target is lost at a row's or a shard's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from services.common.artifacts.manifest import Count, Manifest, ManifestModel, Many, Phase, RelativePath, Sha256, Text
from services.common.input.problem_list import list_names

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


VocabularyKind = Literal["sentencepiece", "tokenizer_json", "tiktoken"]


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
            raise ValueError(f"BOS {self.bos_id:,} or EOS {self.eos_id:,} is beyond its {self.vocab_size:,} ids")
        return self


class SplitCounts(ManifestModel):
    documents: Count
    document_tokens: Count
    """Tokens of the documents' text, without BOS and EOS."""
    bos: Count
    eos: Count
    rows: Count
    tail_tokens: Count
    shards: Many[RelativePath]

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


class SourceCounts(ManifestModel):
    """What a source of the recipe became."""

    uri: Text
    weight: Annotated[float, Field(ge=0)]
    documents: Count
    """Kept, once for each time that a weight above 1 keeps them."""
    tokens: Count
    """With BOS and EOS."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Of the corpus's tokens."""


class CorpusPayload(ManifestModel):
    vocabulary: Vocabulary
    token_dtype: Literal["uint16", "uint32"]
    sequence_length: Annotated[int, Field(ge=1, lt=2**31)]
    rows_per_shard: Annotated[int, Field(ge=1, lt=2**63)]
    encoder: Text
    """What made the ids."""
    reference: Text
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
    sources: Many[SourceCounts]
    text_bytes: Count
    """UTF-8 bytes of the documents that were kept."""
    splits: dict[Split, SplitCounts]
    phases: Many[Phase]

    @property
    def kept(self) -> Collection[SplitCounts]:
        """The counts of each split: what became of the documents that were kept."""
        return self.splits.values()

    def num_samples(self, split: Split) -> int:
        """Training samples that a split's tokens make: L inputs each, and one token more for the last target."""
        return max(0, (self.splits[split].tokens - 1) // self.sequence_length)

    @model_validator(mode="after")
    def _nothing_is_lost(self) -> Self:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"its splits are {', '.join(self.splits) or 'none'}, expected {' and '.join(SPLITS)}")
        for name, counts in self.splits.items():
            stored = counts.rows * self.sequence_length + counts.tail_tokens
            if counts.tokens != stored:
                raise ValueError(f"{name}: {counts.tokens:,} tokens were encoded and {stored:,} are stored")
            if len(counts.shards) != -(-counts.rows // self.rows_per_shard):
                raise ValueError(f"{name}: {counts.rows:,} rows in {len(counts.shards):,} shards")
        kept = sum(counts.documents for counts in self.kept)
        dropped = self.documents_empty + self.documents_too_short + self.documents_not_sampled
        if kept + dropped != self.documents_read:
            raise ValueError(f"{self.documents_read:,} documents read, {kept:,} kept, {dropped:,} dropped")
        if self.documents_with_invalid_utf8 > self.documents_read:
            raise ValueError(
                f"{self.documents_with_invalid_utf8:,} of {self.documents_read:,} documents with invalid UTF-8"
            )
        return self

    @model_validator(mode="after")
    def _comes_from_its_sources(self) -> Self:
        """A corpus that was made from text has sources; one that a test or another program packed may have none."""
        if not self.sources:
            return self
        counted = {
            "documents": (sum(each.documents for each in self.sources), sum(each.documents for each in self.kept)),
            "tokens": (sum(each.tokens for each in self.sources), sum(each.tokens for each in self.kept)),
        }
        for what, (of_sources, of_splits) in counted.items():
            if of_sources != of_splits:
                raise ValueError(f"its sources became {of_sources:,} {what}, its splits have {of_splits:,}")
        return self

    @model_validator(mode="after")
    def _has_room_for_its_ids(self) -> Self:
        if self.vocabulary.vocab_size - 1 > np.iinfo(self.token_dtype).max:
            raise ValueError(f"{self.vocabulary.vocab_size:,} ids do not fit into {self.token_dtype}")
        return self


class CorpusManifest(Manifest):
    SCHEMA: ClassVar[str] = "corpus/2"

    corpus: CorpusPayload

    @model_validator(mode="after")
    def _lists_what_it_is_read_from(self) -> Self:
        vocabulary = self.corpus.vocabulary
        shards = [path for counts in self.corpus.splits.values() for path in counts.shards]
        read = [vocabulary.path, *shards, *map(tail_path, self.corpus.splits)]
        self.require_listed(read)
        for split, counts in self.corpus.splits.items():
            if list(counts.shards) != sorted(counts.shards, key=lambda path: (len(path), path)):
                raise ValueError(
                    f"the shards of {split} are not in the order of their names, which is that of the text"
                )
        if twice := [path for path, count in Counter(read).items() if count > 1]:
            raise ValueError(f"{list_names(twice)}: named more than once, so rows would be read twice")
        for split, counts in self.corpus.splits.items():
            if elsewhere := [path for path in counts.shards if not path.startswith(f"{split}/")]:
                raise ValueError(f"{list_names(elsewhere)}: shards of {split}, expected below {split}/")
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
                    f"made of {list_names(map(str, made_of))}, its recipe asks for {list_names(map(str, wanted))}"
                )
        for name in ("sequence_length", "rows_per_shard"):
            made = getattr(self.corpus, name)
            if not isinstance(asked, dict) or asked.get(name) != made:
                got = asked.get(name) if isinstance(asked, dict) else None
                raise ValueError(f"corpus.{name}: {made:,}, its recipe asks for {got}")
        return self

    @classmethod
    def upgrade(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """corpus/1 had no other encoder than SentencePiece, and took every document of every source."""
        if raw.get("schema") != "corpus/1":
            return raw
        payload = raw.get("corpus")
        if not isinstance(payload, dict):
            return {**raw, "schema": cls.SCHEMA}
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


def tail_path(split: Split) -> str:
    """Of the file with the tokens that fill no row."""
    return f"{split}/tail/tail.arrow"


def arrow_schema(token_dtype: str, sequence_length: int) -> pa.Schema:
    token = pa.from_numpy_dtype(np.dtype(token_dtype))
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(pa.field("item", token, nullable=False), sequence_length), nullable=False),
            pa.field("doc_starts", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        ]
    )
