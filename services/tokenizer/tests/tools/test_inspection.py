"""Looking into a corpus: its numbers, and its documents as text."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.artifacts.corpus import CorpusManifest, Split
from services.common.artifacts.store import Artifact
from services.common.vocabularies.sentencepiece_model import load_model
from services.tokenizer.tests.builders import REPOSITORY, VOCAB_SIZE, make_text, read_stream
from services.tokenizer.tests.tools.corpora import SPECIAL, Tool, flip_a_token, make_corpus, write_tokenizer_json


def shown_documents(output: str) -> list[str]:
    """The documents that `inspect` prints, without the margin and the marks around each."""
    parts = re.split(r"^document [\d,]+ of .*$", output, flags=re.MULTILINE)[1:]
    texts = ["\n".join(line[4:] for line in part.splitlines() if line.startswith("  │")) for part in parts]
    assert all(text.startswith("⟨BOS⟩") and text.endswith("⟨EOS⟩") for text in texts)
    return [text.removeprefix("⟨BOS⟩").removesuffix("⟨EOS⟩") for text in texts]


def without_line_ends(text: str) -> str:
    return re.sub(r" *\n", "\n", text)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_person_sees_the_numbers_of_a_corpus(corpus: Artifact[CorpusManifest], tool: Tool, split: Split) -> None:
    said = tool("inspect", corpus.path, "--split", split)
    payload, splits = corpus.manifest.corpus, corpus.manifest.corpus.splits
    lengths = np.array([len(document) for document in read_stream(corpus.path, split).documents])
    streams = {each: read_stream(corpus.path, each) for each in splits}
    files = [path for path in corpus.path.rglob("*") if path.is_file() and path.name != "manifest.json"]
    stored = sum(path.stat().st_size for path in files)
    tokens = sum(len(stream.tokens) for stream in streams.values())

    expected: dict[str, list[Any]] = {
        "documents": [len(stream.starts) for stream in streams.values()],
        "tokens": [len(stream.tokens) for stream in streams.values()],
        "BOS": [np.count_nonzero(stream.tokens == 1) for stream in streams.values()],
        "EOS": [np.count_nonzero(stream.tokens == 2) for stream in streams.values()],
        "rows": [len(stream.tokens) // 16 for stream in streams.values()],
        "tail tokens": [len(stream.tokens) % 16 for stream in streams.values()],
        "shards": [-(-(len(stream.tokens) // 16) // 8) for stream in streams.values()],
        "samples": [(len(stream.tokens) - 1) // 16 for stream in streams.values()],
    }
    assert said.exit_code == 0
    for name, counts in expected.items():
        assert said.value(name).split() == [f"{count:,}" for count in counts], name
    assert f"{payload.text_bytes / tokens:.3f} a token" in said.value("text")
    assert f"{stored:,} bytes, {stored / tokens:.3f} a token, of which 2 " in said.value("files")
    assert payload.encoder in said.value("ids")
    assert f"{payload.documents_checked:,}" in said.value("ids")
    source = payload.sources[0]
    assert f"100.0%       1  {source.documents:>9,}  {source.tokens:>6,}  {source.uri}" in said.output
    assert said.value("min") == (
        f"{lengths.min()}, median {np.quantile(lengths, 0.5, method='inverted_cdf'):,}, mean {lengths.mean():,.1f}, "
        f"p99 {np.quantile(lengths, 0.99, method='inverted_cdf'):,}, max {lengths.max():,}"
    )


def test_the_histogram_counts_every_document_in_its_power_of_two(corpus: Artifact[CorpusManifest], tool: Tool) -> None:
    said = tool("inspect", corpus.path, "--documents", "0")
    rows = re.findall(r"^ +([\d,]+) +to +([\d,]+) +([\d,]+) +([\d.]+)%(?:  (\S+))?$", said.output, re.MULTILINE)
    found = {int(low): (int(high.replace(",", "")), int(count), len(bar)) for low, high, count, _, bar in rows}
    lengths = [len(document) for document in read_stream(corpus.path, "train").documents]

    counts = {low: sum(low <= length <= high for length in lengths) for low, (high, _, _) in found.items()}
    assert {low: count for low, (_, count, _) in found.items()} == counts
    assert sum(counts.values()) == len(lengths)
    assert all(high == 2 * low - 1 for low, (high, _, _) in found.items())
    fullest = max(counts, key=lambda low: counts[low])
    assert found[fullest][2] == 40
    assert all((bar > 0) == (count > 0) for _, count, bar in found.values())
    assert "│" not in said.output


def test_every_document_can_be_read_again(corpus: Artifact[CorpusManifest], documents: list[bytes], tool: Tool) -> None:
    """Also the one that has the text of BOS and EOS in it: each stands between the marks once."""
    seen = []
    for split in ("train", "validation"):
        seen += shown_documents(tool("inspect", corpus.path, "--split", split, "--documents", "1000").output)
    short = {without_line_ends(each.decode()) for each in documents if len(each) < 240}

    assert len(seen) == len(documents)
    assert len(short) > 10
    assert short <= set(seen)
    assert SPECIAL.decode() in seen


def test_a_long_document_is_cut_in_the_middle(tmp_path: Path, model: Path, tool: Tool) -> None:
    """What is left is exact, also a space at the cut, which SentencePiece drops where it decodes an end alone."""
    text = b"the stream of tokens continues while nothing gets lost " * 100
    made = make_corpus(tmp_path, [text], tokenizer__model=str(model))
    ids = read_stream(made.path, "train").tokens.tolist()
    processor = load_model(model.read_bytes())
    head, tail_begin = str(processor.decode(ids[1:120])), len(str(processor.decode(ids[1:-60])))
    tail = text.decode()[tail_begin:]
    (shown,) = shown_documents(tool("inspect", made.path).output)

    assert tail.startswith(" ")
    assert shown == f"{head}⟨… {len(ids) - 120 - 60:,} tokens left out …⟩{tail}"


def test_documents_are_drawn_by_the_seed(corpus: Artifact[CorpusManifest], tool: Tool) -> None:
    drawn = [tool("inspect", corpus.path, "--seed", seed, "--documents", "5").output for seed in ("1", "1", "2")]

    assert drawn[0] == drawn[1] != drawn[2]
    assert len(shown_documents(drawn[0])) == len(shown_documents(drawn[2])) == 5


def test_what_would_act_on_a_terminal_is_escaped(tmp_path: Path, model: Path, tool: Tool) -> None:
    text = b"\x1b]0;title\x07 \x1b[31mred\r\n\0 \xe2\x80\xae reversed\ttab " * 3
    made = make_corpus(tmp_path, [text], tokenizer__model=str(model))
    said = tool("inspect", made.path)

    assert r"\x1b]0;title\x07 \x1b[31mred\r" in said.output
    assert r"\x00 \u202e reversed" in said.output
    assert "\ttab" in said.output
    assert not set(said.output) & set("\x1b\x07\r\0\u202e")


def test_a_terminal_without_unicode_gets_escapes(corpus: Artifact[CorpusManifest]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.tokenizer", "inspect", str(corpus.path), "--documents", "100"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert "⟨BOS⟩".encode("ascii", "backslashreplace") in done.stdout


def write_tiktoken(path: Path) -> Path:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", b" the", b"in", b"ing"]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def make_byte_level_corpus(folder: Path, kind: str, texts: list[bytes]) -> Artifact[CorpusManifest]:
    if kind == "tiktoken":
        given, size = write_tiktoken(folder / "tokenizer.model"), 256 + 6 + 256
    else:
        given, size = write_tokenizer_json(folder / "tokenizer.json", texts, "<s>", "</s>"), VOCAB_SIZE
    return make_corpus(folder / "made", texts, tokenizer__model=str(given), model__vocab_size=size)


@pytest.mark.parametrize("kind", ["tokenizer_json", "tiktoken"])
def test_vocabularies_of_llama_3_are_decoded_too(tmp_path: Path, documents: list[bytes], tool: Tool, kind: str) -> None:
    texts = [*documents[:30], SPECIAL]
    made = make_byte_level_corpus(tmp_path, kind, texts)
    said = tool("inspect", made.path, "--documents", "100")
    seen = shown_documents(said.output)

    assert said.value("vocabulary").startswith(f"{kind}, {made.manifest.corpus.vocabulary.vocab_size:,} ids")
    assert len(seen) == len(texts)
    assert SPECIAL.decode() in seen
    for shown, text in zip(seen, texts, strict=True):
        head, _, tail = shown.partition("⟨…")
        assert without_line_ends(text.decode()).startswith(head)
        assert without_line_ends(text.decode()).endswith(tail.partition("…⟩")[2])


@pytest.mark.parametrize("kind", ["tokenizer_json", "tiktoken"])
def test_ids_that_llama_3_has_no_text_for_are_named(
    tmp_path: Path, documents: list[bytes], tool: Tool, kind: str
) -> None:
    made = make_byte_level_corpus(tmp_path, kind, documents[:30])
    flip_a_token(made.path / "train" / "shard-00000.arrow", 5, made.manifest.corpus.vocabulary.vocab_size)
    said = tool("inspect", made.path, "--documents", "100")

    assert said.exit_code == 3
    assert str(made.manifest.corpus.vocabulary.vocab_size) in said.errors
    assert "artifacts verify" in said.errors


def test_borders_are_where_the_corpus_says_even_if_bos_is_eos(
    tmp_path: Path, documents: list[bytes], tool: Tool
) -> None:
    """As in GPT-2's vocabulary, where one token is both."""
    given = write_tokenizer_json(tmp_path / "tokenizer.json", documents, "<|endoftext|>")
    borders = {"tokenizer__bos_token": "<|endoftext|>", "tokenizer__eos_token": "<|endoftext|>"}
    made = make_corpus(tmp_path / "made", [b"one" * 20, b"two" * 20], tokenizer__model=str(given), **borders)
    said = tool("inspect", made.path)

    assert re.findall(r"│ ⟨BOS/EOS⟩(.*)⟨BOS/EOS⟩$", said.output, re.MULTILINE) == ["one" * 20, "two" * 20]
    assert said.value("documents").split() == ["2", "0"]


def test_a_split_without_documents_says_so(tmp_path: Path, model: Path, tool: Tool) -> None:
    made = make_corpus(tmp_path, [make_text(2_000)], tokenizer__model=str(model))
    said = tool("inspect", made.path, "--split", "validation")

    assert said.exit_code == 0
    assert "no documents in validation" in said.output
