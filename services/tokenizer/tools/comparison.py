"""`diff DIR DIR`: whether two corpora have the same content, and if not, where they part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.common.artifacts.corpus import SPLITS, CorpusManifest, Split
from services.common.artifacts.files import verify_files
from services.common.artifacts.store import Artifact
from services.common.telemetry import show_progress
from services.tokenizer.tools.stored_stream import Excerpt, StoredStream, open_corpus
from services.tokenizer.tools.stored_text import CONTEXT_TOKENS, StoredText
from services.tokenizer.tools.tool_parser import ToolParser

EXIT_SAME, EXIT_DIFFERENT = 0, 3

_COMPARED_TOKENS = 2**22
"""Of each corpus at a time."""
_SHOWN_IDS, _SHOWN_TOKENS = 4, 24
"""On each side of a difference, as ids and as text."""

Corpus = Artifact[CorpusManifest]


def diff(argv: list[str]) -> int:
    """Compare two published corpora: exit code 0 for the same tokens and documents, 3 for others."""
    parser = ToolParser("diff", diff.__doc__ or "")
    parser.add_argument("left", type=Path, metavar="DIR", help="the folder of a published corpus")
    parser.add_argument("right", type=Path, metavar="DIR", help="the folder of another")
    arguments = parser.parse(argv)
    left, right = open_corpus(arguments.left.absolute()), open_corpus(arguments.right.absolute())
    print(f"left   {left.path}\nright  {right.path}\n", flush=True)
    if left.manifest.content_digest == right.manifest.content_digest:
        print(f"identical: both manifests list the same files and checksums, content {left.manifest.content_digest}")
        return EXIT_SAME
    notes = {"vocabulary": _compare_vocabularies(left, right), "layout": _compare_layouts(left, right)}
    for title, lines in notes.items():
        print("\n".join([f"  {title:<10}  {'different' if lines else 'the same'}", *lines]), flush=True)
    different = [split for split in SPLITS if not _compare_split(left, right, split)]
    if different:
        print(f"\ndifferent: {' and '.join(different)}")
        return EXIT_DIFFERENT
    others = " and ".join(title for title, lines in notes.items() if lines)
    print(f"\nthe same tokens and documents, {f'with another {others}' if others else 'in files of other bytes'}")
    return EXIT_SAME


@dataclass(frozen=True)
class Difference:
    """The first token that is not the same, or begins a document on one side alone, or that one side lacks."""

    position: int
    document: int
    """Its ordinal."""
    offset: int
    """Of the token in the document."""


def find_difference(left: StoredStream, right: StoredStream, split: Split) -> Difference | None:
    """Read both until they part."""
    all_tokens = max(left.num_tokens, right.num_tokens)
    num_documents = newest_start = 0
    with show_progress(f"compare {split}", all_tokens, "tokens") as progress:
        for begin in range(0, all_tokens, _COMPARED_TOKENS):
            end = begin + _COMPARED_TOKENS
            ours, theirs = left.read(begin, end), right.read(begin, end)
            position = _first_difference(ours, theirs)
            starts = np.union1d(ours.starts, theirs.starts)
            if position is not None:
                starts = starts[starts <= position]
            num_documents += len(starts)
            newest_start = int(starts[-1]) if len(starts) else newest_start
            if position is not None:
                return Difference(position, num_documents - 1, position - newest_start)
            progress.advance_to(min(end, all_tokens))
    return None


def _first_difference(left: Excerpt, right: Excerpt) -> int | None:
    found = []
    num_tokens = min(len(left.tokens), len(right.tokens))
    is_other = left.tokens[:num_tokens] != right.tokens[:num_tokens]
    if is_other.any():
        found.append(left.begin + int(is_other.argmax()))
    elif len(left.tokens) != len(right.tokens):
        found.append(left.begin + num_tokens)
    found += np.setxor1d(left.starts, right.starts, assume_unique=True)[:1].tolist()
    return min(found, default=None)


def _compare_vocabularies(left: Corpus, right: Corpus) -> list[str]:
    if _has_same_vocabulary(left, right):
        return []
    described = [
        f"{each.kind}, {each.vocab_size:,} ids, BOS is {each.bos_id:,}, EOS is {each.eos_id:,}, sha256 {each.sha256}"
        for each in (left.manifest.corpus.vocabulary, right.manifest.corpus.vocabulary)
    ]
    return [f"    left      {described[0]}", f"    right     {described[1]}"]


def _has_same_vocabulary(left: Corpus, right: Corpus) -> bool:
    return left.manifest.corpus.vocabulary == right.manifest.corpus.vocabulary


def _compare_layouts(left: Corpus, right: Corpus) -> list[str]:
    sides = [
        {
            "sequence_length": f"{each.sequence_length:,}",
            "rows_per_shard": f"{each.rows_per_shard:,}",
            "token_dtype": each.token_dtype,
        }
        for each in (left.manifest.corpus, right.manifest.corpus)
    ]
    return [
        f"    {name}: left {ours}, right {theirs}"
        for (name, ours), theirs in zip(sides[0].items(), sides[1].values(), strict=True)
        if ours != theirs
    ]


def _compare_split(left: Corpus, right: Corpus, split: Split) -> bool:
    """Print how the two compare. Is it the same stream?"""
    streams = [StoredStream(each.path, each.manifest.corpus, split) for each in (left, right)]
    difference = find_difference(streams[0], streams[1], split)
    if difference is None:
        found = f"the same {streams[0].num_tokens:,} tokens in {streams[0].num_documents:,} documents"
        print(f"  {split:<10}  {found}", flush=True)
        return True
    position = difference.position
    sides = list(zip(("left", "right"), (left, right), streams, strict=True))
    for _, corpus, stream in sides:  # damage must not pass for other content
        verify_files(corpus.path, corpus.manifest, paths=stream.paths(position, position + 1))
    lines = [f"  {split:<10}  different"]
    lines += [
        f"    {side:<8}  {each.num_tokens:,} tokens in {each.num_documents:,} documents" for side, _, each in sides
    ]
    lines.append(
        f"    first at  token {position:,}: document {difference.document:,}, token {difference.offset:,} of it "
        f"(all from 0)"
    )
    lines += [f"    {side:<8}  ids {_show_ids(stream, position)}" for side, _, stream in sides]
    if _has_same_vocabulary(left, right):
        for side, corpus, stream in sides:
            lines += _with_margin(side, _show_text(stream, position, StoredText(corpus)))
    print("\n".join(lines), flush=True)
    return False


def _with_margin(title: str, text: str) -> list[str]:
    first, *others = text.split("\n")
    return [f"    {title:<8}│ {first}", *(f"    {'':<8}│ {line}".rstrip() for line in others)]


def _show_ids(stream: StoredStream, position: int) -> str:
    """The ids around a position, with itself in brackets."""
    before = stream.read(max(0, position - _SHOWN_IDS), position).tokens.tolist()
    here, *after = stream.read(position, position + 1 + _SHOWN_IDS).tokens.tolist() or ["end of the stream"]
    return " ".join([*map(str, before), f"[{here}]", *map(str, after)])


def _show_text(stream: StoredStream, position: int, text: StoredText) -> str:
    """The text around a position, which ⟨≠⟩ marks."""
    begin = max(0, position - _SHOWN_TOKENS)
    before = stream.read(begin, position).tokens
    earlier = stream.read(max(0, begin - CONTEXT_TOKENS), begin).tokens
    after = stream.read(position, position + _SHOWN_TOKENS).tokens
    return f"{text.show(before, before=earlier)}⟨≠⟩{text.show(after, before=before[-CONTEXT_TOKENS:])}"
