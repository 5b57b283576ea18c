"""A vocabulary or a text with a name that is unusual or wrong."""

from __future__ import annotations

import os
from pathlib import Path

from services.tokenizer.tests.bad_input.stage import Stage, write_parquet


def test_a_vocabulary_behind_a_link_is_read(stage: Stage, tmp_path: Path, model: Path) -> None:
    write_parquet(tmp_path / "text.parquet")
    (tmp_path / "link").symlink_to(model)
    assert stage.run(tmp_path / "text.parquet", tokenizer__model=str(tmp_path / "link")) == 0


def test_a_folder_is_no_vocabulary(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "text.parquet")
    assert str(tmp_path) in stage.refuse(2, tmp_path / "text.parquet", tokenizer__model=str(tmp_path))


def test_a_bad_line_in_a_file_whose_name_is_not_utf8_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / os.fsdecode(b"\xff.jsonl")).write_bytes(b'{"text": "x"}\n{"text": \n')
    assert r"\udcff.jsonl:2" in stage.refuse(3, tmp_path / "text")
