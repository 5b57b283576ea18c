"""Pipes, devices, sockets and links instead of a text or a vocabulary are refused by name, without a wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.testing.strange_files import STRANGE_FILES, replace_by
from services.tokenizer.sources import file_system
from services.tokenizer.tests.bad_input.stage import Stage, write_parquet

ALLOWED_IN_A_RECIPE = ("link outside",)
"""A path in a recipe may be a link to any place."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a" / "b"
    made.mkdir(parents=True)
    return made


@pytest.mark.parametrize("kind", [kind for kind in STRANGE_FILES if kind not in ALLOWED_IN_A_RECIPE])
def test_a_vocabulary_that_is_no_regular_file_is_refused(stage: Stage, folder: Path, kind: str) -> None:
    write_parquet(folder / "text.parquet")
    replace_by(kind, folder / "tokenizer.model")

    message = stage.refuse(3, folder / "text.parquet", tokenizer__model=str(folder / "tokenizer.model"))

    assert "tokenizer.model: " in message
    assert "--root" not in message


def test_a_vocabulary_behind_a_link_is_read(stage: Stage, folder: Path, model: Path) -> None:
    write_parquet(folder / "text.parquet")
    (folder / "link").symlink_to(model)

    assert stage.run(folder / "text.parquet", tokenizer__model=str(folder / "link")) == 0


def test_a_file_that_is_larger_than_any_vocabulary_is_refused(
    stage: Stage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(folder / "text.parquet")
    monkeypatch.setattr(file_system, "MAX_VOCABULARY_BYTES", 1_000)

    assert "1,000 bytes" in stage.refuse(3, folder / "text.parquet")


def test_a_folder_that_holds_a_vocabulary_names_the_file(stage: Stage, folder: Path, model: Path) -> None:
    write_parquet(folder / "text.parquet")
    (folder / "tokenizer.model").write_bytes(model.read_bytes())

    message = stage.refuse(2, folder / "text.parquet", tokenizer__model=str(folder))

    assert f'"{folder}/tokenizer.model"' in message


def test_a_bad_line_in_a_file_whose_name_is_not_utf8_is_named(stage: Stage, folder: Path) -> None:
    (folder / os.fsdecode(b"\xff.jsonl")).write_bytes(b'{"text": "x"}\n{"text": \n')

    assert r"\udcff.jsonl:2" in stage.refuse(3, folder)


@pytest.mark.parametrize("kind", [kind for kind in STRANGE_FILES if kind not in ALLOWED_IN_A_RECIPE])
@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_a_source_that_is_no_regular_file_is_refused(stage: Stage, folder: Path, name: str, kind: str) -> None:
    replace_by(kind, folder / name)
    if kind == "folder":
        replace_by("pipe", folder / name / "b.txt")

    message = stage.refuse(3, folder / name)

    assert str(folder / name) in message


@pytest.mark.parametrize("kind", [kind for kind in STRANGE_FILES if kind not in ("folder", *ALLOWED_IN_A_RECIPE)])
def test_what_is_no_regular_file_of_a_folder_of_text_is_refused(stage: Stage, folder: Path, kind: str) -> None:
    (folder / "a.txt").write_text("a text", encoding="utf-8")
    replace_by(kind, folder / "b.txt")

    message = stage.refuse(3, folder)

    assert "b.txt: " in message or "pipe: " in message


@pytest.mark.parametrize("name", ["x" * 5_000, "a/" * 2_500])
def test_a_name_of_5000_letters_is_refused(stage: Stage, folder: Path, name: str) -> None:
    write_parquet(folder / "text.parquet")

    for uri, model in ((folder / name, None), (folder / "text.parquet", folder / name)):
        assert stage.run(uri, **({"tokenizer__model": str(model)} if model else {})) in (2, 3)
