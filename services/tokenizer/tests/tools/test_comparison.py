"""Two corpora side by side: what is the same, and where they part."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.common.testing.manifests import forge
from services.tokenizer.tests.builders import VOCAB_SIZE, read_stream
from services.tokenizer.tests.tools.corpora import (
    Tool,
    flip_a_token,
    lose_a_document,
    make_corpus,
    write_tokenizer_json,
)
from services.tokenizer.tools import comparison


def test_the_same_recipe_made_twice_is_identical(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    again = make_corpus(
        tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), tokenizer__num_workers=2
    )
    said = tool("diff", corpus.path, again.path)

    assert said.exit_code == 0
    assert "identical" in said.output
    assert corpus.manifest.content_digest in said.output


@pytest.mark.parametrize(
    "layout",
    [
        {"corpus__rows_per_shard": 5},
        {"corpus__sequence_length": 24},
        {"corpus__sequence_length": 9, "corpus__rows_per_shard": 1000},
    ],
)
@pytest.mark.parametrize("compared_tokens", [2**22, 7, 128])
def test_the_same_text_in_other_rows_is_the_same_stream(
    corpus: Artifact[CorpusManifest],
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, int],
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    other = make_corpus(tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), **layout)
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 0
    assert said.value("vocabulary") == "the same"
    assert said.value("layout") == "different"
    for name in ("sequence_length", "rows_per_shard"):
        assert (f"{name}: left" in said.output) == (f"corpus__{name}" in layout)
    for split, counts in corpus.manifest.corpus.splits.items():
        assert said.value(split) == f"the same {counts.tokens:,} tokens in {counts.documents:,} documents"
    assert said.output.endswith("the same tokens and documents, with another layout\n")


@pytest.mark.parametrize("compared_tokens", [2**22, 7])
def test_one_changed_document_is_found_where_it_is(
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    changed = list(documents)
    begin = len(changed[30]) // 2
    changed[30] = changed[30][:begin] + "Ünlike".encode() + changed[30][begin:]
    left = make_corpus(tmp_path / "left", documents, tokenizer__model=str(model))
    right = make_corpus(tmp_path / "right", changed, tokenizer__model=str(model), corpus__rows_per_shard=3)
    ours, theirs = read_stream(left.path, "train"), read_stream(right.path, "train")
    size = min(len(ours.tokens), len(theirs.tokens))
    position = int(np.argmax(ours.tokens[:size] != theirs.tokens[:size]))
    said = tool("diff", left.path, right.path)

    assert said.exit_code == 3
    assert said.errors.count("millrace:") == 0
    assert said.value("train") == "different"
    assert f"{len(ours.tokens):,} tokens in 52 documents" in said.output
    assert f"{len(theirs.tokens):,} tokens in 52 documents" in said.output
    assert said.value("first at") == (
        f"token {position:,}: document 30, token {position - ours.starts[30]:,} of it (all from 0)"
    )
    for stream in (ours, theirs):
        before, here, after = np.split(stream.tokens[position - 4 : position + 5], [4, 5])
        assert f"ids {' '.join(map(str, before))} [{here[0]}] {' '.join(map(str, after))}\n" in said.output
    left_text, right_text = said.output.split("    left    │ ")[1].split("    right   │ ")
    assert left_text.split("⟨≠⟩")[0] == right_text.split("⟨≠⟩")[0]
    assert ("Ünlike" in left_text, "⟨≠⟩Ünlike" in right_text) == (False, True)
    assert said.output.endswith("different: train\n")


@pytest.mark.parametrize(("is_left_longer", "compared_tokens"), [(True, 2**22), (False, 2**22), (True, 1)])
def test_a_corpus_that_only_goes_on_parts_at_the_others_end(
    documents: list[bytes],
    model: Path,
    tmp_path: Path,
    tool: Tool,
    monkeypatch: pytest.MonkeyPatch,
    is_left_longer: bool,
    compared_tokens: int,
) -> None:
    monkeypatch.setattr(comparison, "_COMPARED_TOKENS", compared_tokens)
    short = make_corpus(tmp_path / "short", documents[:20], tokenizer__model=str(model))
    longer = make_corpus(tmp_path / "longer", documents[:21], tokenizer__model=str(model))
    end = len(read_stream(short.path, "train").tokens)
    said = tool("diff", *((longer.path, short.path) if is_left_longer else (short.path, longer.path)))

    assert said.exit_code == 3
    assert said.value("first at") == f"token {end:,}: document 20, token 0 of it (all from 0)"
    side = "right" if is_left_longer else "left"
    assert re.search(rf"^    {side} +ids .* 2 \[end of the stream\]$", said.output, re.MULTILINE)


def test_the_text_around_a_difference_is_as_it_was_written(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    """SentencePiece puts a space before a document, which is not the author's."""
    ends = {"left": b"the stream of tokens " * 9, "right": b"nothing gets lost " * 9}
    made = [
        make_corpus(tmp_path / side, [documents[0], end], tokenizer__model=str(model)).path
        for side, end in ends.items()
    ]
    said = tool("diff", *made)

    assert "token 1 of it" in said.value("first at")
    assert "⟨EOS⟩⟨BOS⟩⟨≠⟩the stream of tokens the" in said.output
    assert "⟨EOS⟩⟨BOS⟩⟨≠⟩nothing gets lost nothing" in said.output


def test_tokens_that_belong_to_no_further_document_are_another_stream(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    short = make_corpus(tmp_path / "short", documents[:20], tokenizer__model=str(model))
    longer = make_corpus(tmp_path / "longer", documents[:21], tokenizer__model=str(model))
    end = len(read_stream(short.path, "train").tokens)
    lose_a_document(longer.path / "train" / f"shard-{end // (8 * 16):05d}.arrow")
    forge(longer.path)
    said = tool("diff", short.path, longer.path)

    assert read_stream(longer.path, "train").starts == read_stream(short.path, "train").starts
    assert said.exit_code == 3
    assert said.value("first at").startswith(f"token {end:,}: ")


def test_documents_that_begin_elsewhere_are_another_corpus(
    documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    """The tokens may be the same, and attention is not."""
    stored = make_corpus(tmp_path, documents, tokenizer__model=str(model))
    other = Path(shutil.copytree(stored.path, tmp_path / "other"))
    lose_a_document(other / "train" / "shard-00001.arrow")
    lost = next(start for start in reversed(read_stream(stored.path, "train").starts) if start < 2 * 8 * 16)
    forge(other)
    said = tool("diff", stored.path, other)

    assert said.exit_code == 3
    assert said.value("first at").startswith(f"token {lost:,}: document ")


def test_a_difference_in_validation_alone_is_seen(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    other = Path(shutil.copytree(corpus.path, tmp_path / "other"))
    flip_a_token(other / "validation" / "shard-00000.arrow", 3, 77)
    forge(other)
    said = tool("diff", corpus.path, other)

    assert said.exit_code == 3
    assert said.value("train").startswith("the same")
    assert said.value("validation") == "different"
    assert "token 3: document 0, token 3 of it" in said.value("first at")
    assert said.output.endswith("different: validation\n")


def test_damage_does_not_pass_for_other_content(
    corpus: Artifact[CorpusManifest], documents: list[bytes], model: Path, tmp_path: Path, tool: Tool
) -> None:
    other = make_corpus(
        tmp_path, documents, corpus__validation_fraction=0.3, tokenizer__model=str(model), corpus__rows_per_shard=9
    )
    assert tool("diff", corpus.path, other.path).exit_code == 0
    flip_a_token(other.path / "train" / "shard-00000.arrow", 20, 77)
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 3
    assert "train/shard-00000.arrow: xxh3-128 is" in said.errors
    assert "different: train" not in said.output


def test_another_vocabulary_is_named_and_its_ids_are_not_taken_for_text(
    corpus: Artifact[CorpusManifest], documents: list[bytes], tmp_path: Path, tool: Tool
) -> None:
    given = write_tokenizer_json(tmp_path / "tokenizer.json", documents, "<s>", "</s>")
    other = make_corpus(tmp_path / "other", documents, corpus__validation_fraction=0.3, tokenizer__model=str(given))
    said = tool("diff", corpus.path, other.path)

    assert said.exit_code == 3
    assert said.value("vocabulary") == "different"
    for each in (corpus, other):
        vocabulary = each.manifest.corpus.vocabulary
        assert re.search(rf"{vocabulary.kind}, 400 ids, .* sha256 {vocabulary.sha256}", said.output)
    assert "[0]" in said.output
    assert "[1]" in said.output
    assert "⟨≠⟩" not in said.output
    assert said.output.endswith("different: train and validation\n")


def test_a_vocabulary_that_has_grown_gives_the_same_tokens_in_wider_ids(
    documents: list[bytes], tmp_path: Path, tool: Tool
) -> None:
    made = []
    for name, unused in (("narrow", 0), ("wide", 70_000)):
        given = write_tokenizer_json(tmp_path / f"{name}.json", documents, "<s>", "</s>", unused=unused)
        size = VOCAB_SIZE + unused
        made.append(make_corpus(tmp_path / name, documents, tokenizer__model=str(given), model__vocab_size=size).path)
    said = tool("diff", *made)

    assert said.exit_code == 0
    assert "token_dtype: left uint16, right uint32" in said.output
    assert said.output.endswith("the same tokens and documents, with another vocabulary and layout\n")
