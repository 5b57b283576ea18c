"""`train-vocab` makes the vocabulary that the stage would have trained."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact
from services.tokenizer.tests.builders import (
    VOCAB_SIZE,
    Tool,
    make_documents,
    make_text,
    published,
    run,
    write_documents,
    write_recipe,
)
from services.tokenizer.vocabulary.training import train_vocabulary


@pytest.fixture
def documents() -> list[bytes]:
    return [*make_documents(50), "größe </s> <s> 漢字 and 🎉".encode()]


def make_corpus(folder: Path, documents: list[bytes], **overrides: Any) -> Artifact[CorpusManifest]:
    folder.mkdir()
    recipe = write_recipe(folder, write_documents(folder / "text", documents), **overrides)
    assert run(recipe, folder / "fsx") == 0
    return published(folder / "fsx")


def test_a_vocabulary_made_alone_is_the_stages_own(tmp_path: Path, documents: list[bytes], tool: Tool) -> None:
    made = make_corpus(tmp_path / "stage", documents)
    path = tmp_path / "alone.model"
    result = tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, tmp_path / "stage" / "text")

    assert result.exit_code == 0
    assert path.read_bytes() == (made.path / "tokenizer" / "tokenizer.model").read_bytes()
    assert result.value("sha256") == made.manifest.corpus.vocabulary.sha256
    assert result.value("pieces").startswith(f"{VOCAB_SIZE},")
    assert result.value("size") == f"{path.stat().st_size:,} bytes"
    assert result.value("text") == f"{sum(map(len, documents)):,} bytes of {len(documents)} documents"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["alone.model"]

    recipe = tomllib.loads(result.output[result.output.index("[tokenizer]\n") :])
    assert recipe == {"tokenizer": {"model": str(path)}, "model": {"vocab_size": VOCAB_SIZE}}
    again = make_corpus(tmp_path / "again", documents, tokenizer__model=recipe["tokenizer"]["model"])
    assert again.manifest.content_digest == made.manifest.content_digest


def test_a_vocabulary_is_made_from_documents_of_all_sources_in_any_order(
    tmp_path: Path, documents: list[bytes], tool: Tool
) -> None:
    texts = [document.decode() for document in documents]
    pq.write_table(pa.table({"body": texts[:30]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[30:]))
    limit = sum(map(len, documents)) // 2
    options = ("--vocab-size", VOCAB_SIZE, "--max-bytes", limit, "--column", "body")
    uris = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    for name, order in (("a.model", uris), ("b.model", uris[::-1])):
        result = tool("train-vocab", "--output", tmp_path / name, *options, *order)
        assert result.value("text").startswith(f"{limit:,} bytes of ")

    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_a_vocabulary_that_is_there_is_never_overwritten(tmp_path: Path, documents: list[bytes], tool: Tool) -> None:
    text = write_documents(tmp_path / "text", documents)
    path = tmp_path / "mine.model"
    path.write_bytes(b"mine")
    result = tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, text)

    assert result.exit_code == 2
    assert "mine.model" in result.errors
    assert path.read_bytes() == b"mine"


def test_a_vocabulary_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, documents: list[bytes], tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_documents(tmp_path / "text", documents)
    path = tmp_path / "mine.model"

    def train_slowly(*arguments: Any) -> bytes:
        path.write_bytes(b"another's")
        return train_vocabulary(*arguments)

    monkeypatch.setattr("services.tokenizer.tools.vocabulary_tool.train_vocabulary", train_slowly)
    assert tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, text).exit_code == 2
    assert path.read_bytes() == b"another's"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.model", "text"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--vocab-size", "90000", "TEXT"], 2, ["90,000", "--vocab-size"]),
        (["--vocab-size", "299", "TEXT"], 2, ["vocab-size", "300", "Usage: python -m services.tokenizer train-vocab"]),
        (["--vocab-size", "400", "--max-bytes", "0", "TEXT"], 2, ["max-bytes", "Usage"]),
        (["--vocab-size", "400", "--format", "word", "TEXT"], 2, ["--format", "wikicorpus"]),
        (["--vocab-size", "400"], 2, ["SOURCE", "Usage"]),
        (["--vocab-size", "400", "missing.txt"], 3, ["missing.txt"]),
        (["--vocab-size", "400", "EMPTY"], 3, ["empty.txt"]),
    ],
)
def test_a_vocabulary_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, tool: Tool, arguments: list[str], exit_code: int, expected: list[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    (tmp_path / "empty.txt").touch()
    files = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt"}
    result = tool("train-vocab", "--output", folder / "a.model", *(files.get(each, each) for each in arguments))

    assert result.exit_code == exit_code, result.errors
    assert all(part in result.errors for part in expected), result.errors
    assert list(folder.iterdir()) == []


def test_a_vocabulary_needs_a_folder_that_is_there(tmp_path: Path, tool: Tool) -> None:
    result = tool("train-vocab", "--output", tmp_path / "missing" / "a.model", "--vocab-size", "400", "pydoc://")

    assert result.exit_code == 2
    assert str(tmp_path / "missing") in result.errors
