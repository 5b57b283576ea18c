"""Where documents come from: the same documents give the same tokens, however they are stored and cut."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.recipe import Source, load_recipe
from services.tokenizer.plan import make_plan
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import (
    decode_documents,
    make_documents,
    published,
    run,
    write_documents,
    write_recipe,
)

DOCUMENTS = ["first\r\nline", "", " ", "nul\0", "emoji 👍🏽", "e\u0301", '" and \\ and \u2028 and \x85 breaks', "last"]
DOCUMENTS += [document.decode() for document in make_documents(200, mean_bytes=60)]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")


def write_raw_jsonl(path: Path) -> None:
    """Characters as themselves, no line end after the last line, and lines with nothing on them."""
    lines = "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in DOCUMENTS)
    path.write_text(lines, encoding="utf-8")


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text or None}) + "\n" for text in DOCUMENTS)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), path, row_group_size=7)


def write_dictionary_parquet(path: Path) -> None:
    column = pa.array([text or None for text in DOCUMENTS]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), path, row_group_size=100)


@pytest.mark.parametrize("split_bytes", [1, 37, 1_000, 10**9])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.json", write_raw_jsonl),
        ("a.jsonl.gz", write_gzip),
        ("a.parquet", write_parquet),
        ("b.parquet", write_dictionary_parquet),
    ],
)
def test_every_format_gives_every_document_once_and_in_order(
    tmp_path: Path, name: str, write: Callable[[Path], None], split_bytes: int
) -> None:
    write(tmp_path / name)
    files = list_inputs(Source(uri=str(tmp_path)))
    pieces = [piece for file in files for piece in cut_file(file, split_bytes)]

    documents = [document.decode() for batch in read_documents(pieces, "reject") for document in batch.documents()]

    assert documents == DOCUMENTS


def test_a_large_jsonl_is_cut_and_small_files_share_a_split(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "large.jsonl")
    write_documents(tmp_path / "small", make_documents(20, mean_bytes=20))
    recipe = load_recipe(
        write_recipe(tmp_path, tmp_path / "large.jsonl", tmp_path / "small", corpus__split_bytes=2_000)
    )

    splits = make_plan(recipe).splits

    files_per_split = [len({piece.file.name for piece in split.pieces}) for split in splits]
    assert max(files_per_split) > 5
    assert sum(split.pieces[0].file.name == "large.jsonl" for split in splits) > 5
    assert all(split.bytes <= 2_000 for split in splits)


def test_files_folders_and_globs_are_read_in_the_order_of_the_recipe(tmp_path: Path) -> None:
    write_documents(tmp_path / "folder" / "deep", [b"in a folder"])
    (tmp_path / "one.md").write_bytes(b"a file")
    write_documents(tmp_path / "many", [b"glob one", b"glob two", b"glob three"])
    (tmp_path / "many" / "notes.rst").write_bytes(b"not matched")
    recipe = write_recipe(
        tmp_path,
        tmp_path / "one.md",
        tmp_path / "many" / "0000[02].txt",
        tmp_path / "folder",
        tokenizer__train__vocab_size=300,
        model__vocab_size=300,
    )
    assert run(recipe, tmp_path / "fsx") == 0
    found = decode_documents(published(tmp_path / "fsx").path, "train")
    assert found == [b"a file", b"glob one", b"glob three", b"in a folder"]


def test_a_folder_says_what_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.png", "c.pyc", "d.pyc", "README", ".hidden.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        files = list_inputs(Source(uri=str(tmp_path)))

    assert [file.name for file in files] == ["a.txt"]
    assert "4 files skipped" in caplog.text
    assert ".pyc (2)" in caplog.text
    assert len(list_inputs(Source(uri=str(tmp_path), format="text"))) == 5


def test_bytes_that_are_not_utf8_in_json_are_repaired_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "lone \\ud800 surrogate"}\n{"text": "pair \\ud83d\\ude00"}\n'
    )
    files = list_inputs(Source(uri=str(tmp_path)))
    [batch] = read_documents(cut_file(files[0], 10**6), "replace")

    expected = ["caf\ufffd", "lone \ufffd surrogate", "pair 😀"]
    assert [document.decode() for document in batch.documents()] == expected
    assert batch.num_repaired == 2


def test_other_file_systems_are_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec  # noqa: PLC0415

    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/a.txt", make_documents(1, mean_bytes=3_000)[0])
    recipe = write_recipe(tmp_path, "memory://texts/*.txt", tokenizer__train__vocab_size=300, model__vocab_size=300)
    before = make_plan(load_recipe(recipe)).artifact_id
    assert run(recipe, tmp_path / "fsx") == 0
    assert decode_documents(published(tmp_path / "fsx").path, "train") == make_documents(1, mean_bytes=3_000)

    memory.pipe("/texts/a.txt", b"something else")
    assert make_plan(load_recipe(recipe)).artifact_id != before
