"""Writes and reads the same documents in several file formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import InvalidUtf8, cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import MAX_DOCUMENT_BYTES, make_documents

DOCUMENTS = ["first\r\nline", "", " ", "nul\0", "emoji 👍🏽", "e\u0301", '" and \\ and \u2028 and \x85 breaks', "last"]
DOCUMENTS += [document.decode() for document in make_documents(140, mean_bytes=60)]


def read_all(
    source: Source,
    split_bytes: int = 10**9,
    *,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    invalid_utf8: InvalidUtf8 = "reject",
    bad_rows: BadRows | None = None,
) -> list[str]:
    """Return the documents of a source as the tasks of the stage read them."""
    pieces = [piece for file in list_inputs(source) for piece in cut_file(file, split_bytes)]
    return [
        document.decode()
        for batch in read_documents(pieces, invalid_utf8, max_document_bytes, bad_rows)
        for document in batch.documents()
    ]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")


def write_gzip(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text or None}) + "\n" for text in DOCUMENTS)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), path, row_group_size=7)
