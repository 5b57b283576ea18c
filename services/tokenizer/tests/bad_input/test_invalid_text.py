"""Text that is not UTF-8 is replaced and counted, or refused with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, write_table
from services.tokenizer.tests.builders import decode_documents, published
from services.tokenizer.tests.stored_documents import read_all

SURROGATES = [r"\ud800", r"\udfff and \udc80"]
"""Escapes in JSON."""


def test_lone_surrogates_are_replaced_and_counted(stage: Stage, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%s %d"}\n' % (text.encode(), index) for index, text in enumerate(SURROGATES))
    (tmp_path / "a.jsonl").write_bytes(lines + jsonl(TEXTS))

    assert stage.run(tmp_path / "a.jsonl") == 0

    corpus = published(stage.root)
    expected = ["\ufffd 0", "\ufffd and \ufffd 1"]
    assert [document.decode() for document in decode_documents(corpus.path, "train")] == expected + TEXTS
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 2


@pytest.mark.parametrize("text", SURROGATES)
def test_a_lone_surrogate_is_rejected_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b'\n{"text": "lone %s"}\n' % text.encode())
    with pytest.raises(ArtifactError, match=r"a\.jsonl:62: .*0x.. at 5 "):
        read_all(Source(uri=str(tmp_path)), 3_000)


@pytest.mark.parametrize("writer", [pq.ParquetWriter, pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("split_bytes", [1, 10**6])
def test_a_broken_value_of_a_binary_column(tmp_path: Path, writer: Callable[..., Any], split_bytes: int) -> None:
    """Rows 48 and 51 of 60 in groups of 20 are not UTF-8."""
    values = [text.encode() for text in TEXTS]
    values[47] = b"latin-1 caf\xe9"
    values[50] = "cut off €".encode()[:-1]
    path = tmp_path / ("a.parquet" if writer is pq.ParquetWriter else "a.arrow")
    write_table(path, pa.table({"text": pa.array(values, pa.binary())}), writer)

    with pytest.raises(ArtifactError, match=rf"{path.name}: row 48, column 'text': .*0xe9 at 11"):
        read_all(Source(uri=str(path)), split_bytes)
    expected = [value.decode("utf-8", "replace") for value in values]
    assert read_all(Source(uri=str(path)), split_bytes, invalid_utf8="replace") == expected
