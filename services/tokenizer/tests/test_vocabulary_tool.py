"""`train-vocab` makes the vocabulary that the stage would have trained."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from services.common.process.entry_point import exit_code_of
from services.tokenizer.__main__ import main
from services.tokenizer.tests.builders import (
    VOCAB_SIZE,
    make_documents,
    make_text,
    publish,
    write_documents,
    write_recipe,
)


def train_vocab(*arguments: object) -> int:
    """Call the tool in this process, and return its exit code."""
    return exit_code_of(lambda: main(["train-vocab", *map(str, arguments)]))


def test_a_vocabulary_made_alone_is_the_stages_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [*make_documents(50), "größe </s> <s> 漢字 and 🎉".encode()]
    text = write_documents(tmp_path / "text", documents)
    made = publish(write_recipe(tmp_path, text), tmp_path / "fsx")
    path = tmp_path / "alone.model"
    command = ("--output", path, "--vocab-size", VOCAB_SIZE, text)
    capsys.readouterr()

    assert train_vocab(*command) == 0

    output = capsys.readouterr().out
    assert path.read_bytes() == (made.path / "tokenizer" / "tokenizer.model").read_bytes()
    assert made.manifest.corpus.vocabulary.sha256 in output
    recipe = tomllib.loads(output[output.index("[tokenizer]\n") :])
    assert recipe == {"tokenizer": {"model": str(path)}, "model": {"vocab_size": VOCAB_SIZE}}
    again = publish(write_recipe(tmp_path, text, tokenizer__model=str(path)), tmp_path / "again")
    assert again.manifest.content_digest == made.manifest.content_digest

    path.write_bytes(b"mine")  # is never overwritten
    assert train_vocab(*command) == 2
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--vocab-size", "90000", "TEXT"], 2, "vocab_size"),
        (["--vocab-size", "299", "TEXT"], 2, "vocab-size"),
        (["--vocab-size", "400", "--max-bytes", "0", "TEXT"], 2, "max-bytes"),
        (["--vocab-size", "400"], 2, "SOURCE"),
        (["--vocab-size", "400", "missing.txt"], 3, "missing.txt"),
        (["--vocab-size", "400", "EMPTY"], 3, "empty.txt"),
    ],
)
def test_a_vocabulary_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int, expected: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "text.txt").write_bytes(make_text(20_000))
    (tmp_path / "empty.txt").touch()
    files = {"TEXT": tmp_path / "text.txt", "EMPTY": tmp_path / "empty.txt"}
    options = (str(files.get(each, each)) for each in arguments)
    assert train_vocab("--output", folder / "a.model", *options) == exit_code
    assert expected in capsys.readouterr().err
    assert list(folder.iterdir()) == []
