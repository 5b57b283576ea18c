"""`train-vocab` makes the vocabulary that the stage would have trained."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

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
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["alone.model"]

    recipe = tomllib.loads(result.output[result.output.index("[tokenizer]\n") :])
    assert recipe == {"tokenizer": {"model": str(path)}, "model": {"vocab_size": VOCAB_SIZE}}
    again = make_corpus(tmp_path / "again", documents, tokenizer__model=recipe["tokenizer"]["model"])
    assert again.manifest.content_digest == made.manifest.content_digest


def test_a_vocabulary_that_is_there_is_never_overwritten(tmp_path: Path, documents: list[bytes], tool: Tool) -> None:
    text = write_documents(tmp_path / "text", documents)
    path = tmp_path / "mine.model"
    path.write_bytes(b"mine")
    result = tool("train-vocab", "--output", path, "--vocab-size", VOCAB_SIZE, text)

    assert result.exit_code == 2
    assert "mine.model" in result.errors
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--vocab-size", "90000", "TEXT"], 2, "--vocab-size"),
        (["--vocab-size", "299", "TEXT"], 2, "vocab-size"),
        (["--vocab-size", "400", "--max-bytes", "0", "TEXT"], 2, "max-bytes"),
        (["--vocab-size", "400"], 2, "SOURCE"),
        (["--vocab-size", "400", "missing.txt"], 3, "missing.txt"),
        (["--vocab-size", "400", "EMPTY"], 3, "empty.txt"),
    ],
)
def test_a_vocabulary_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, tool: Tool, arguments: list[str], exit_code: int, expected: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    (tmp_path / "empty.txt").touch()
    files = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt"}
    result = tool("train-vocab", "--output", folder / "a.model", *(files.get(each, each) for each in arguments))

    assert result.exit_code == exit_code, result.errors
    assert expected in result.errors
    assert list(folder.iterdir()) == []
