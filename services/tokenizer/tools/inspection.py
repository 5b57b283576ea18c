"""`inspect DIR`: what is in a corpus, in numbers and in text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import SPLITS, CorpusManifest, CorpusPayload, Split
from services.common.artifacts.files import total_bytes
from services.common.artifacts.store import Artifact
from services.tokenizer.tools.stored_stream import StoredStream, open_corpus
from services.tokenizer.tools.stored_text import CONTEXT_TOKENS, StoredText
from services.tokenizer.tools.tool_parser import ToolParser

_WHOLE_TOKENS = 240
"""Of a document that is shown whole."""
_HEAD_TOKENS, _TAIL_TOKENS = 120, 60
"""Of a longer one that are shown."""
_BAR_CHARACTERS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"

Integers = npt.NDArray[np.int64]


def inspect(argv: list[str]) -> int:
    """Show what is in a published corpus: counts, lengths of documents, some documents as text."""
    parser = ToolParser("inspect", f"{inspect.__doc__} Of the files, sizes are checked and checksums are not.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of a published corpus")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="how many to show (default: 3)")
    parser.add_argument("--split", choices=SPLITS, default="train", help="of which documents are (default: train)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="chooses them (default: 0)")
    arguments = parser.parse(argv)
    if arguments.documents < 0:
        parser.error(f"--documents {arguments.documents}: expected 0 or more")
    corpus = open_corpus(arguments.folder.absolute())
    print("\n".join(_describe(corpus)))
    stream = StoredStream(corpus.path, corpus.manifest.corpus, arguments.split)
    chosen = random.Random(arguments.seed).sample(
        range(stream.num_documents), min(arguments.documents, stream.num_documents)
    )
    lengths, documents = measure_documents(stream, sorted(chosen))
    print("\n".join(["", *_describe_lengths(lengths, arguments.split)]))
    if documents:
        text = StoredText(corpus)
        for document in documents:
            print("\n".join(["", *_show_document(stream, document, text, arguments.split)]), flush=True)
    return 0


@dataclass(frozen=True)
class Document:
    """Where a document lies in its stream: tokens [begin, end), with BOS and EOS."""

    ordinal: int
    begin: int
    end: int


@dataclass(frozen=True)
class Lengths:
    """How many documents have which length. A stream of T tokens has fewer than √(2T) lengths: 0.3 million in 50
    billion tokens, where the documents are many more.
    """

    tokens: Integers
    """Ascending."""
    documents: Integers

    @classmethod
    def of(cls, lengths: Integers) -> Lengths:
        return cls(*np.unique(lengths, return_counts=True))

    def plus(self, other: Lengths) -> Lengths:
        tokens, index = np.unique(np.append(self.tokens, other.tokens), return_inverse=True)
        documents = np.zeros(len(tokens), np.int64)
        np.add.at(documents, index, np.append(self.documents, other.documents))
        return Lengths(tokens, documents)

    @property
    def mean(self) -> float:
        return float(self.tokens @ self.documents / self.documents.sum())

    def at_rank(self, share: float) -> int:
        """The length that this share of the documents does not exceed."""
        ranks = np.cumsum(self.documents)
        return int(self.tokens[np.searchsorted(ranks, share * ranks[-1])])


def measure_documents(stream: StoredStream, wanted: Sequence[int]) -> tuple[Lengths, list[Document]]:
    """The lengths of all documents, and the places of some that are given by ascending ordinals."""
    lengths = Lengths.of(np.empty(0, np.int64))
    places: list[Document] = []
    first = 0
    for borders in stream.document_borders():
        lengths = lengths.plus(Lengths.of(np.diff(borders)))
        last = first + len(borders) - 1
        places += [
            Document(ordinal, *borders[ordinal - first : ordinal - first + 2].tolist())
            for ordinal in wanted
            if first <= ordinal < last
        ]
        first = last
    return lengths, places


def _describe(corpus: Artifact[CorpusManifest]) -> list[str]:
    manifest, payload = corpus.manifest, corpus.manifest.corpus
    vocabulary, producer = payload.vocabulary, manifest.producer
    tokens = max(1, sum(counts.tokens for counts in payload.splits.values()))
    stored_bytes = total_bytes(manifest.files)
    return [
        f"{corpus.path}",
        f"  made        {manifest.created_at:%Y-%m-%d %H:%M} UTC by {producer.service} {producer.version}, recipe "
        f"{manifest.recipe.get('name', 'unknown')}",
        f"  vocabulary  {vocabulary.kind}, {vocabulary.vocab_size:,} ids, BOS is {vocabulary.bos_id:,}, EOS is "
        f"{vocabulary.eos_id:,}, {vocabulary.path}, sha256 {vocabulary.sha256[:12]}",
        f"  ids         by {payload.encoder}, compared with {payload.reference}'s for "
        f"{payload.documents_checked:,} documents",
        f"  layout      rows of {payload.sequence_length:,} tokens, {payload.rows_per_shard:,} rows a shard, "
        f"{payload.token_dtype}",
        f"  text        {payload.text_bytes:,} bytes, {payload.text_bytes / tokens:.3f} a token",
        f"  files       {stored_bytes:,} bytes, {stored_bytes / tokens:.3f} a token, of which "
        f"{np.dtype(payload.token_dtype).itemsize} are the id",
        "",
        *_describe_splits(payload),
        "",
        *_describe_sources(payload),
    ]


def _describe_splits(payload: CorpusPayload) -> list[str]:
    splits = payload.splits.values()
    counts = {
        "documents": [each.documents for each in splits],
        "tokens": [each.tokens for each in splits],
        "  of text": [each.document_tokens for each in splits],
        "  BOS": [each.bos for each in splits],
        "  EOS": [each.eos for each in splits],
        "rows": [each.rows for each in splits],
        "tail tokens": [each.tail_tokens for each in splits],
        "shards": [len(each.shards) for each in splits],
        "samples": [max(0, (each.tokens - 1) // payload.sequence_length) for each in splits],
    }
    rows = [[name, *(f"{count:,}" for count in each)] for name, each in counts.items()]
    return _align([["", *payload.splits], *rows], "<" + ">" * len(splits))


def _describe_sources(payload: CorpusPayload) -> list[str]:
    if not payload.sources:
        return ["  sources     not recorded: the corpus was made before their counts were"]
    rows = [
        [f"{each.share:.1%}", f"{each.weight:g}", f"{each.documents:,}", f"{each.tokens:,}", each.uri]
        for each in payload.sources
    ]
    return _align([["share", "weight", "documents", "tokens", "source"], *rows], ">>>><")


def _describe_lengths(lengths: Lengths, split: Split) -> list[str]:
    """Numbers and a histogram in powers of two."""
    if not len(lengths.tokens):
        return [f"no documents in {split}"]
    exponents = np.frexp(lengths.tokens)[1] - 1
    documents = np.bincount(exponents, lengths.documents).astype(np.int64)
    first, all_documents, most = int(exponents[0]), int(documents.sum()), int(documents.max())
    rows = []
    for power, count in enumerate(documents[first:].tolist(), start=first):
        low, high = 2**power, 2 ** (power + 1) - 1
        share = f"{count / all_documents:.1%}"
        rows.append([f"{low:,}", "to", f"{high:,}", f"{count:,}", share, _bar(count / most)])
    return [
        f"tokens of a document in {split}, with BOS and EOS",
        f"  min {lengths.tokens[0]:,}, median {lengths.at_rank(0.5):,}, mean {lengths.mean:,.1f}, "
        f"p99 {lengths.at_rank(0.99):,}, max {lengths.tokens[-1]:,}",
        "",
        *_align([["tokens", "", "", "documents", "", ""], *rows], "><>>><"),
    ]


def _bar(share: float) -> str:
    """At least an eighth of a character for anything at all."""
    full, eighths = divmod(max(round(share * _BAR_CHARACTERS * 8), int(share > 0)), 8)
    return ("█" * full + _EIGHTHS[eighths]).rstrip()


def _show_document(stream: StoredStream, document: Document, text: StoredText, split: Split) -> list[str]:
    begin, end = document.begin, document.end
    size = end - begin
    if size <= _WHOLE_TOKENS:
        shown = text.show(stream.read(begin, end).tokens)
    else:
        head_end, tail_begin = begin + _HEAD_TOKENS, end - _TAIL_TOKENS
        head = text.show(stream.read(begin, head_end).tokens)
        before_tail = stream.read(tail_begin - CONTEXT_TOKENS, tail_begin).tokens
        tail = text.show(stream.read(tail_begin, end).tokens, before=before_tail)
        shown = f"{head}⟨… {tail_begin - head_end:,} tokens left out …⟩{tail}"
    return [
        f"document {document.ordinal:,} of {split} (from 0), {size:,} tokens, from token {begin:,} on",
        *(f"  │ {line}".rstrip() for line in shown.split("\n")),
    ]


def _align(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Columns as wide as their widest cell; `sides` has < or > for each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return [("  " + "  ".join(row)).rstrip() for row in cells]
