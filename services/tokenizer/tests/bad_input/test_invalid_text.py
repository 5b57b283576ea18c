"""Text that is not UTF-8 is replaced and counted, or refused with its place."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, write_arrow
from services.tokenizer.tests.builders import decode_documents, published

SURROGATES = [r"\ud800", r"\udfff and \udc80", r"\udcc3\udca9"]
"""Escapes in JSON. The last two would be the bytes of an é."""


def test_lone_surrogates_are_replaced_and_counted(stage: Stage, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%s %d"}\n' % (text.encode(), index) for index, text in enumerate(SURROGATES))
    (tmp_path / "a.jsonl").write_bytes(lines + jsonl(TEXTS))

    assert stage.run(tmp_path / "a.jsonl") == 0

    corpus = published(stage.root)
    expected = ["\ufffd 0", "\ufffd and \ufffd 1", "\ufffd\ufffd 2"]
    assert [document.decode() for document in decode_documents(corpus.path, "train")] == expected + TEXTS
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 3


@pytest.mark.parametrize("text", SURROGATES)
def test_a_lone_surrogate_is_rejected_with_its_line(stage: Stage, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b'\n{"text": "lone %s"}\n' % text.encode())
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__invalid_utf8="reject", corpus__split_bytes=3_000)
    assert all(part in message for part in ("a.jsonl:62 ", "0x", "at 5 ", 'corpus.invalid_utf8 = "replace"'))


def write_binary_column(folder: Path, ending: str) -> Path:
    """Write 60 rows in groups of 20. Rows 48 and 51 are not UTF-8."""
    values = [text.encode() for text in TEXTS]
    values[47] = b"latin-1 caf\xe9"
    values[50] = "cut off €".encode()[:-1]
    table = pa.table({"text": pa.array(values, pa.binary())})
    path = folder / f"a{ending}"
    if ending == ".parquet":
        pq.write_table(table, path, row_group_size=20)
    else:
        write_arrow(path, table, pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream)
    return path.rename(path.with_suffix(".arrow")) if ending == ".stream" else path


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".stream"])
def test_a_broken_value_of_a_binary_column_is_replaced_and_counted(stage: Stage, tmp_path: Path, ending: str) -> None:
    assert stage.run(write_binary_column(tmp_path, ending)) == 0

    corpus = published(stage.root)
    documents = decode_documents(corpus.path, "train")
    assert (documents[47], documents[50]) == ("latin-1 caf\ufffd".encode(), "cut off \ufffd".encode())
    assert [document for index, document in enumerate(documents) if index not in (47, 50)] == [
        text.encode() for index, text in enumerate(TEXTS) if index not in (47, 50)
    ]
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 2


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".stream"])
@pytest.mark.parametrize("split_bytes", [1, 10**6])
def test_a_broken_value_of_a_binary_column_is_rejected_with_its_row(
    stage: Stage, tmp_path: Path, ending: str, split_bytes: int
) -> None:
    path = write_binary_column(tmp_path, ending)
    message = stage.refuse(3, path, corpus__invalid_utf8="reject", corpus__split_bytes=split_bytes)
    assert all(part in message for part in (f"{path.name}: row 48, column 'text' ", "0xe9 at 11"))
