"""Files that are no vocabulary are refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.tokenizer.tests.bad_input.stage import Stage, write_parquet


def test_a_vocabulary_file_without_a_byte_is_refused(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "empty.model").touch()
    assert "empty.model: " in stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "empty.model"))


def test_a_sentencepiece_model_that_is_cut_off_is_refused(stage: Stage, tmp_path: Path, model: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    content = model.read_bytes()
    for size in (1, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.model").write_bytes(content[:size])
        assert "cut.model: " in stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "cut.model"))


BORDERS = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "KeyError('model')"),
        ({"model": {"vocab": {"a": "x"}}}, "TypeError"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}, "KeyError('content')"),
        ({"model": {"vocab": {}}}, "tokenizer.bos_token"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": BORDERS}, "tokenizers "),
    ],
)
def test_json_that_is_no_vocabulary_is_refused(
    stage: Stage, tmp_path: Path, content: dict[str, object], reason: str
) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "other.json").write_text(json.dumps(content))
    message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "other.json"))
    assert "other.json: " in message
    assert reason in message


def test_a_tokenizer_json_that_is_cut_off_is_refused(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b"')
    model = tmp_path / "tokenizer.json"
    assert f"{model}: " in stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(model))


def test_a_tokenizer_json_whose_borders_are_not_known_says_which_there_are(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    added = [{"id": index, "content": f"[{name}]"} for index, name in enumerate(("CLS", "SEP"), start=1)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    settings = {"tokenizer__model": str(tmp_path / "tokenizer.json")}

    message = stage.refuse(3, tmp_path / "a.parquet", **settings)

    named = ("tokenizer.json: ", "tokenizer.bos_token", "tokenizer.eos_token", "[CLS], [SEP]")
    assert all(part in message for part in named)
    wrong = {"tokenizer__bos_token": "[CLS]", "tokenizer__eos_token": "[END]"}
    assert "[CLS], [SEP]" in stage.refuse(3, tmp_path / "a.parquet", **settings, **wrong)


def tiktoken_lines(ranks: Sequence[int]) -> bytes:
    return b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % rank for byte, rank in enumerate(ranks))


@pytest.mark.parametrize(
    "content",
    [
        tiktoken_lines([rank + (rank > 100) for rank in range(256)]),
        tiktoken_lines(range(256))[:-3],
        tiktoken_lines(range(200)),
        tiktoken_lines([0, 1, 1, *range(3, 256)]),
    ],
    ids=["a gap", "cut off", "bytes without a token", "a rank twice"],
)
def test_a_tiktoken_file_that_is_not_whole_is_refused(stage: Stage, tmp_path: Path, content: bytes) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.tiktoken").write_bytes(content)
    assert "a.tiktoken: " in stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "a.tiktoken"))
