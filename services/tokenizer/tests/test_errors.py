"""Wrong recipes and wrong inputs end with their exit code and the place of the fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.tests.builders import Stage, make_documents, make_text, run, write_documents, write_recipe


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def empty_files(folder: Path) -> Path:
    return write_documents(folder / "text", [b"", b""])


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("write", "exit_code", "expected"),
    [
        (lambda folder: folder / "missing", 3, "missing"),
        (lambda folder: folder / "*.nothing", 3, "*.nothing"),
        (empty_folder, 3, "empty"),
        (empty_files, 3, "0 documents"),
        (file("tiny.txt", b"tiny"), 3, "corpus.sequence_length"),
        (file("a.bin", b"x"), 2, "a.bin"),
        (lambda _: "floppy://a/text", 4, "floppy://a/text"),
        (lambda _: "ftp://127.0.0.1:1/a/text", 3, "ftp://127.0.0.1:1/a/text"),
        (lambda folder: f"zip://*.txt::{folder}/a.zip", 2, "a.zip"),
        (lambda _: "pydoc://json", 2, "pydoc://json"),
    ],
)
def test_wrong_inputs(stage: Stage, write: Callable[[Path], Any], exit_code: int, expected: str) -> None:
    assert expected in stage.refuse(exit_code, write(stage.folder))


@pytest.mark.parametrize(
    ("overrides", "exit_code", "expected"),
    [
        ({"tokenizer__train__vocab_size": 9_000, "model__vocab_size": 9_000}, 2, "model.vocab_size"),
        ({"tokenizer__model": "missing.model"}, 3, "missing.model"),
        ({"tokenizer__model": "MODEL", "model__vocab_size": 500}, 2, "500"),
    ],
)
def test_wrong_vocabularies(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, Any],
    exit_code: int,
    expected: str,
) -> None:
    overrides = {key: str(model) if value == "MODEL" else value for key, value in overrides.items()}
    recipe = write_recipe(tmp_path, write_documents(tmp_path / "text", make_documents(30)), **overrides)
    assert run(recipe, tmp_path / "fsx") == exit_code
    assert expected in capsys.readouterr().err


def test_an_error_in_a_worker_process_is_the_stages_error(stage: Stage, tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text", [make_text(9_000, seed=seed) for seed in range(6)] + [b"caf\xe9"])
    settings = {"corpus__invalid_utf8": "reject", "corpus__split_bytes": 1, "tokenizer__num_workers": 2}
    assert "00006.txt: document 1: " in stage.refuse(3, text, **settings)


def test_dry_run_computes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "missing")
    assert run(recipe, tmp_path / "fsx", "--dry-run", "--train.max_steps=77") == 0
    printed = capsys.readouterr().out
    assert '"max_steps": 77' in printed
    assert not (tmp_path / "fsx").exists()
