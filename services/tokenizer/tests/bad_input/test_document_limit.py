"""`corpus.max_document_bytes` limits documents while files of all formats are read."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.recipe.schema import Source
from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, write_arrow
from services.tokenizer.tests.bad_input.test_archives import ARTICLE, wikicorpus, write_archive
from services.tokenizer.tests.builders import decode_documents, make_text, published
from services.tokenizer.tests.stored_documents import read_all

LIMIT = 2_000
LONG = make_text(LIMIT + 1).decode()
TERABYTE = 2**40


def table(texts: list[str], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"text": pa.array(texts, kind)})


def stream(path: Path, texts: pa.Table) -> None:
    write_arrow(path, texts, pa.ipc.new_stream)


# Functions that write TEXTS, and a given text as document 61.
WRITERS: dict[str, Callable[[Path, str], object]] = {
    "a.jsonl": lambda path, text: path.write_bytes(jsonl([*TEXTS, text])),
    "a.jsonl.gz": lambda path, text: path.write_bytes(gzip.compress(jsonl([*TEXTS, text]))),
    "a.parquet": lambda path, text: pq.write_table(table([*TEXTS, text]), path),
    "b.parquet": lambda path, text: pq.write_table(table([*TEXTS, text]), path, use_dictionary=False),
    "a.arrow": lambda path, text: write_arrow(path, table([*TEXTS, text]), pa.ipc.new_file),
    "b.arrow": lambda path, text: stream(path, table([*TEXTS, text], pa.large_string())),
    "c.arrow": lambda path, text: stream(path, table([*TEXTS, text], pa.string_view())),
    "d.arrow": lambda path, text: stream(path, pa.table({"text": pa.array([*TEXTS, text]).dictionary_encode()})),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("split_bytes", [1_500, 10**9])
def test_a_document_above_the_limit_is_named_with_its_place_and_the_recipes_key(
    stage: Stage, tmp_path: Path, name: str, split_bytes: int
) -> None:
    WRITERS[name](tmp_path / name, LONG)
    settings: dict[str, Any] = {"corpus__split_bytes": split_bytes}

    message = stage.refuse(3, tmp_path / name, corpus__max_document_bytes=LIMIT, **settings)

    assert f"{name}:61: " in message if "jsonl" in name else f"{name}: row 61, column 'text'" in message
    assert f"corpus.max_document_bytes = {LIMIT:,}" in message
    assert stage.run(tmp_path / name, corpus__max_document_bytes=len(LONG) + 100, **settings) == 0
    assert decode_documents(published(stage.root).path, "train") == [text.encode() for text in [*TEXTS, LONG]]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_file_of_text_is_a_document_up_to_its_last_byte(
    stage: Stage, tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / ("a.txt" if compress is bytes else "a.txt.gz")
    path.write_bytes(compress(LONG.encode()))
    message = stage.refuse(3, path, corpus__max_document_bytes=LIMIT)
    assert all(part in message for part in (f"{path.name}: ", f"corpus.max_document_bytes = {LIMIT:,}"))
    assert stage.run(path, corpus__max_document_bytes=len(LONG)) == 0


def test_a_line_at_the_limit_is_read_with_either_line_end(stage: Stage, tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * (LIMIT - 12)}).encode() + end for end in (b"\n", b"\r\n", b"")]
    assert {len(line.rstrip()) for line in lines} == {LIMIT}
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    assert stage.run(tmp_path / "a.jsonl", corpus__max_document_bytes=LIMIT) == 0

    stage.root = tmp_path / "another"
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__max_document_bytes=LIMIT - 1)
    assert "a.jsonl:1: " in message


@pytest.mark.parametrize("article", [LONG.replace("\n", " "), "one line of several\n" * 200])
def test_an_article_of_wikicorpus_above_the_limit_is_named_or_skipped(
    stage: Stage, tmp_path: Path, article: str
) -> None:
    articles = "".join(ARTICLE % ("T", text) for text in (*TEXTS[:3], article, *TEXTS[3:]))
    path = write_archive(tmp_path / "raw.en.tgz", articles)
    message = stage.refuse(3, sources=wikicorpus(path), corpus__max_document_bytes=LIMIT)
    assert "raw.en.tgz: raw.en/englishText_0:" in message
    assert "2,000 bytes" in message
    assert stage.run(sources=wikicorpus(path), corpus__max_document_bytes=LIMIT, corpus__bad_rows="skip") == 0
    payload = published(stage.root).manifest.corpus
    assert (payload.documents_read, payload.bad_rows) == (len(TEXTS), {"too long": 1})


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_archive_of_any_format_with_long_names_gives_its_articles(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "raw.en.tar"
    with tarfile.open(path, "w", format=tar_format) as archive:
        for number, text in enumerate(TEXTS):
            content = (ARTICLE % ("T", text)).encode("latin-1")
            name = f"raw.en/{'d' * 90}/{'f' * 90 if tar_format != tarfile.USTAR_FORMAT else 'f'}{number}"
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    expected = [text.strip("\r\n") for text in TEXTS]
    assert read_all(Source(uri=str(path), format="wikicorpus")) == expected


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow"])
def test_a_schema_with_a_name_that_is_not_utf8_is_named(stage: Stage, tmp_path: Path, name: str) -> None:
    columns = pa.table({"text": TEXTS, "another-name": TEXTS})
    if name == "a.parquet":
        pq.write_table(columns, tmp_path / name, store_schema=False)
    else:
        write_arrow(tmp_path / name, columns, pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content.replace(b"another-name", b"another\xffname"))

    message = stage.refuse(3, tmp_path / name)

    assert f"{name}: " in message
