"""Inputs that change while a corpus is made from them are refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer import build
from services.tokenizer.sources.documents import cut_file, list_inputs
from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, overwrite, write_table
from services.tokenizer.tests.builders import (
    decode_documents,
    published,
)


@contextmanager
def before_encoding(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` when the stage has its plan and its vocabulary, and begins to encode."""

    def encode(*arguments: Any) -> Any:
        act()
        return _encode(*arguments)

    _encode = build._encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_encode", encode)
        yield


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(jsonl(["one more line"]))


def replace_by_another_of_the_same_size(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b"the", b"eht"))
    other.replace(path)


def write_in_place(path: Path) -> None:
    overwrite(path, 30, b"X")


@pytest.mark.parametrize(
    ("change", "split_bytes"),
    [
        (append, 2_000),
        (replace_by_another_of_the_same_size, 2_000),
        (write_in_place, 10**6),
        (Path.unlink, 2_000),
    ],
)
def test_an_input_that_changes_between_plan_and_encode_is_named(
    stage: Stage, tmp_path: Path, change: Callable[[Path], None], split_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS))
    with before_encoding(lambda: change(path)):
        assert "a.jsonl: " in stage.refuse(3, path, corpus__split_bytes=split_bytes)

    if path.exists():
        assert stage.run(path, corpus__split_bytes=split_bytes) == 0


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pq.ParquetWriter])
def test_an_input_that_changes_before_it_is_cut_gives_no_plan(tmp_path: Path, writer: Callable[..., Any]) -> None:
    """A plan is kept. It would have lost documents without a word once the listed version was put back."""
    path = tmp_path / ("a.parquet" if writer is pq.ParquetWriter else "a.arrow")
    write_table(path, pa.table({"text": TEXTS}), writer)
    [file] = list_inputs(Source(uri=str(path)))
    shutil.copy2(path, tmp_path / "listed")
    write_table(path, pa.table({"text": TEXTS[:20]}), writer)

    with pytest.raises(ArtifactError, match="changed"):
        cut_file(file, 10**9)

    shutil.copy2(tmp_path / "listed", path)
    assert len(cut_file(file, 10**9)) == -(-len(TEXTS) // 20)


def test_a_copy_that_keeps_the_time_is_the_same_input(stage: Stage, tmp_path: Path) -> None:
    """Every node of a cluster may have its own copy in its image."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS))

    def copy() -> None:
        shutil.copy2(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)

    with before_encoding(copy):
        assert stage.run(path, corpus__split_bytes=2_000) == 0
    assert decode_documents(published(stage.root).path, "train") == [text.encode() for text in TEXTS]
