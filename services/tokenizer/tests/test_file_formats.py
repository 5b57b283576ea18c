"""The rows of JSON, Parquet and Arrow files are documents: with nulls, without rows, nested, compressed, padded."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer.sources.documents import list_inputs
from services.tokenizer.sources.jsonl import require_key
from services.tokenizer.tests.builders import (
    ARTICLE,
    DOCUMENTS,
    TEXTS,
    Stage,
    compress_with_arrow,
    jsonl,
    make_wikicorpus,
    published,
    read_all,
    write_table,
)

ROWS: list[dict[str, Any]] = [
    {"id": number, "text": text, "meta": {"a.b": "no", "en": text[:3]}} for number, text in enumerate(DOCUMENTS[:20])
]
ROWS += [{"id": 20, "text": None, "meta": None}, {"id": 21, "text": "", "meta": {"a.b": None, "en": None}}]
TABLE = pa.Table.from_pylist(ROWS)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def parquet(table: pa.Table) -> Callable[[Path], object]:
    return lambda path: pq.write_table(table, path)


def arrow(table: pa.Table, writer: Callable[..., Any] = pa.ipc.new_stream) -> Callable[[Path], object]:
    return lambda path: write_table(path, table, writer, rows=4)


def with_text(kind: pa.DataType) -> pa.Table:
    return TABLE.set_column(1, "text", TABLE["text"].cast(kind))


def content(written: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(written)


FILES: dict[str, Callable[[Path], object]] = {
    "a.jsonl": content(lines(ROWS)),
    "b.ndjson": content(lines(ROWS)),
    "c.jsonlines": content(lines(ROWS)),
    "d.json": content(lines(ROWS)),
    "array.json": content(json.dumps(ROWS).encode()),
    "indented.json": content(json.dumps(ROWS, indent=2).encode()),
    "marked.json": content(b"\xef\xbb\xbf \r\n" + json.dumps(ROWS, indent=1).encode()),
    "array.json.gz": content(gzip.compress(json.dumps(ROWS).encode())),
    "array.jsonl": content(json.dumps(ROWS).encode()),
    "strings.json": content(json.dumps([row["text"] or "" for row in ROWS]).encode()),
    "null-array.json": content(json.dumps([row if row["text"] is not None else None for row in ROWS]).encode()),
    "null-lines.jsonl": content(b"\n".join(lines([row]) if row["text"] is not None else b"null" for row in ROWS)),
    "e.ndjson.gz": content(gzip.compress(lines(ROWS))),
    "f.JSON.XZ": content(lzma.compress(lines(ROWS))),
    "g.jsonl.zst": content(compress_with_arrow(lines(ROWS), "zstd")),
    "h.jsonl.lz4": content(compress_with_arrow(lines(ROWS), "lz4")),
    "raw.jsonl": content("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()),
    "a.parquet": parquet(TABLE),
    "a.arrow": arrow(TABLE, pa.ipc.new_file),
    "b.arrow": arrow(TABLE),
    "words.parquet": parquet(with_text(pa.dictionary(pa.int32(), pa.string()))),
    "large.arrow": arrow(with_text(pa.large_string())),
    "view.arrow": arrow(with_text(pa.string_view()), pa.ipc.new_file),
    "words.arrow": arrow(with_text(pa.dictionary(pa.int32(), pa.string()))),
}
EXPECTED = [row["text"] or "" for row in ROWS]


@pytest.mark.parametrize("split_bytes", [40, 10**9])
@pytest.mark.parametrize("name", FILES)
def test_rows_are_documents_and_nulls_are_empty(tmp_path: Path, name: str, split_bytes: int) -> None:
    FILES[name](tmp_path / name)
    assert read_all(Source(uri=str(tmp_path)), split_bytes) == EXPECTED


NULLS = pa.table({"id": [1, 2, 3], "text": pa.nulls(3)})
PARTS: dict[str, tuple[Callable[[Path], object], int]] = {
    "nothing.jsonl": (content(b""), 0),
    "blank.jsonl": (content(b"\n \r\n"), 0),
    "nothing.jsonl.gz": (content(gzip.compress(b"")), 0),
    "array.json": (content(b" [ ]\n"), 0),
    "null.jsonl": (content(jsonl([None] * 3)), 3),
    "null-rows.jsonl": (content(b"null\n" * 3), 3),
    "left-out.jsonl": (content(b'{"id": 1}\n' * 3), 3),
    "braces.jsonl": (content(b"{}\n{}"), 2),
    "null.parquet": (parquet(NULLS), 3),
    "null-text.parquet": (parquet(pa.table({"text": pa.nulls(3, pa.string())})), 3),
    "no-rows.parquet": (parquet(NULLS.slice(0, 0)), 0),
    "no-columns.parquet": (parquet(pa.table({})), 0),
    "null.arrow": (arrow(NULLS, pa.ipc.new_file), 3),
    "null-stream.arrow": (arrow(NULLS), 3),
    "null-words.arrow": (arrow(pa.table({"text": pa.nulls(3, pa.string()).dictionary_encode()})), 3),
    "no-rows.arrow": (arrow(NULLS.slice(0, 0), pa.ipc.new_file), 0),
    "no-rows-stream.arrow": (arrow(NULLS.slice(0, 0)), 0),
}


def test_parts_without_text_are_read_among_others_and_their_nulls_are_counted(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, (write, rows) in PARTS.items():
        write(folder / name)
        assert read_all(Source(uri=str(folder / name))) == [""] * rows, name
    (folder / "z.jsonl").write_bytes(jsonl(TEXTS))

    assert stage.run(folder) == 0

    corpus = published(stage.root).manifest.corpus
    nulls = sum(rows for _, rows in PARTS.values())
    assert (corpus.documents_read, corpus.documents_empty) == (len(TEXTS) + nulls, nulls)


@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.parquet", "a.arrow", "b.arrow"])
def test_a_nested_column_is_named_with_a_dot(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    source = Source(uri=str(tmp_path / name), column="meta.en")
    assert read_all(source) == [(row["meta"] or {}).get("en") or "" for row in ROWS]
    assert read_all(source.model_copy(update={"column": "meta.a.b"})) == ["no"] * 20 + [""] * 2


def test_a_column_whose_name_has_a_dot_or_begins_like_another(tmp_path: Path) -> None:
    columns = {"meta": ["m"], "meta.text": ["mt"], "meta.text.en": ["mte"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for column, values in columns.items():
        assert read_all(Source(uri=str(tmp_path / "a.parquet"), column=column)) == values


@pytest.mark.parametrize(("column", "exit_code"), [("body", 2), ("meta.de", 2), ("meta", 3)])
def test_a_key_that_is_missing_or_holds_no_text_is_refused(
    stage: Stage, tmp_path: Path, column: str, exit_code: int
) -> None:
    FILES["a.jsonl"](tmp_path / "a.jsonl")
    message = stage.refuse(exit_code, {"uri": str(tmp_path / "a.jsonl"), "column": column})
    assert "a.jsonl" in message
    assert repr(column) in message


def compress_to_blocks(content: bytes) -> bytes:
    """Compress and pad with zeros as a tape does, or as `xz` may."""
    return lzma.compress(content) + bytes(8)


@pytest.mark.parametrize(
    ("ending", "compress", "after", "is_read"),
    [
        (".gz", gzip.compress, bytes(512), True),
        (".gz", gzip.compress, b"garbage", False),
        (".bz2", bz2.compress, b"", True),
        (".bz2", bz2.compress, b"garbage", False),
        (".xz", lzma.compress, b"", True),
        (".xz", compress_to_blocks, bytes(2**20), True),
        (".xz", compress_to_blocks, b"garbage", False),
    ],
)
def test_streams_that_follow_one_another(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes], after: bytes, is_read: bool
) -> None:
    """Zeros behind a stream of gzip or xz are the padding of tapes and tar."""
    path, half = tmp_path / f"a.jsonl{ending}", len(DOCUMENTS) // 2
    path.write_bytes(compress(jsonl(DOCUMENTS[:half])) + compress(jsonl(DOCUMENTS[half:])) + after)
    if is_read:
        assert read_all(Source(uri=str(path))) == DOCUMENTS
    else:
        with pytest.raises(ArtifactError, match=path.name):
            read_all(Source(uri=str(path)))


@pytest.mark.parametrize(("name", "mode"), [("raw.en.tgz", "w:gz"), ("raw.en.tar", "w")])
def test_a_wikicorpus_archive_gives_its_articles(tmp_path: Path, name: str, mode: str) -> None:
    """The archive's files are in latin-1."""
    articles = [
        "caf\xe9, na\xefve \xa9",
        "first line\n\nsecond  line ",
        " indented",
        "",
        "a ENDOFARTICLE. within a line",
    ]
    members = ["".join(ARTICLE % ("x", text) for text in part) for part in (articles[:3], articles[3:])]
    (tmp_path / name).write_bytes(make_wikicorpus(*members, mode=mode))
    assert read_all(Source(uri=str(tmp_path / name), format="wikicorpus")) == articles


def test_an_array_is_read_a_block_at_a_time(tmp_path: Path) -> None:
    texts = ["x" * 700_000, 'é\\"' * 400_000, *DOCUMENTS, "y" * 3_000_000, *["z" * 20_000] * 1_000]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"n": 1.5e300, "text": text, "b": True} for text in texts]))
    listing = list_inputs(Source(uri=str(path)))
    tracemalloc.start()
    require_key(listing, max_document_bytes=10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3
    assert read_all(Source(uri=str(path))) == texts
