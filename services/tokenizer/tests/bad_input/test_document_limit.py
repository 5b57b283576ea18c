"""`corpus.max_document_bytes` limits documents while files of all formats are read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, write_table
from services.tokenizer.tests.bad_input.test_damage import ARTICLE, archive, source
from services.tokenizer.tests.builders import make_text, read_all

LIMIT = 2_000
LONG = make_text(LIMIT + 1).decode()
ALL = [*TEXTS, LONG]

Write = Callable[[Path], object]


def write_texts(path: Path, kind: pa.DataType, writer: Callable[..., object] = pa.ipc.new_stream) -> None:
    write_table(path, pa.table({"text": pa.array(ALL).cast(kind)}), writer)


WRITERS: dict[str, Write] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(ALL)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ALL))),
    "a.json": lambda path: path.write_text(json.dumps([{"text": text} for text in ALL])),
    "a.parquet": lambda path: pq.write_table(pa.table({"text": ALL}), path),
    "b.parquet": lambda path: pq.write_table(pa.table({"text": ALL}), path, use_dictionary=False),
    "a.arrow": partial(write_texts, kind=pa.string(), writer=pa.ipc.new_file),
    "b.arrow": partial(write_texts, kind=pa.large_string()),
    "c.arrow": partial(write_texts, kind=pa.string_view()),
    "d.arrow": partial(write_texts, kind=pa.dictionary(pa.int32(), pa.string())),
    "raw.tgz": lambda path: path.write_bytes(archive("".join(ARTICLE % ("T", text) for text in ALL))),
}
PLACES = {"jsonl": ":61: ", "json": ": element 61: ", "tgz": ": document 61: "}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("split_bytes", [1_500, 10**9])
def test_a_document_above_the_limit_is_named_or_skipped(tmp_path: Path, name: str, split_bytes: int) -> None:
    WRITERS[name](tmp_path / name)
    given, bad_rows = source(tmp_path / name), BadRows("skip")
    expected = [text.strip("\r\n") for text in ALL] if name == "raw.tgz" else ALL
    place = PLACES.get(name.split(".")[1], ": row 61, column 'text': ")

    with pytest.raises(ArtifactError, match=f"{name}{place}.*max_document_bytes = 2,000"):
        read_all(given, split_bytes, max_document_bytes=LIMIT)

    assert read_all(given, split_bytes, max_document_bytes=LIMIT, bad_rows=bad_rows) == expected[:-1]
    [file] = bad_rows.files()
    assert (Path(file.uri).name, file.rows) == (name, {"too long": 1})
    assert read_all(given, split_bytes, max_document_bytes=LIMIT + 100) == expected


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_file_of_text_is_a_document_up_to_its_last_byte(
    stage: Stage, tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / ("a.txt" if compress is bytes else "a.txt.gz")
    path.write_bytes(compress(LONG.encode()))
    assert f"{path.name}: " in stage.refuse(3, path, corpus__max_document_bytes=LIMIT)
    assert stage.run(path, corpus__max_document_bytes=len(LONG)) == 0


def test_a_line_at_the_limit_is_read_with_either_line_end(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * (LIMIT - 12)}).encode() + end for end in (b"\n", b"\r\n", b"")]
    assert {len(line.rstrip()) for line in lines} == {LIMIT}
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    given = Source(uri=str(tmp_path))
    assert len(read_all(given, max_document_bytes=LIMIT)) == 3
    with pytest.raises(ArtifactError, match=r"a\.jsonl:1: "):
        read_all(given, max_document_bytes=LIMIT - 1)
