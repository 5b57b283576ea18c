"""A byte-order mark names its encoding, and text that is not UTF-8 is replaced and counted, or refused."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import DOCUMENTS, MAX_DOCUMENT_BYTES, jsonl, read_all, write_table
from services.tokenizer.tests.builders import TEXTS as GOOD

MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
TEXTS = {
    "fr": "Ça va très bien, déjà vu à l'été. Le garçon préfère la crème brûlée.\r\n",
    "ru": "Съешь же ещё этих мягких французских булок, да выпей чаю.\n",
    "zh": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n",
    "ja": "いろはにほへと ちりぬるを わかよたれそ つねならむ\n",
    "th": "สวัสดีครับ ผมชื่อสมชาย\n",
}


def read_replaced(path: Path, split_bytes: int = 10**9) -> tuple[list[str], int]:
    """Return the documents of a file, and how many of them were repaired."""
    [file] = list_inputs(Source(uri=str(path)))
    batches = list(read_documents(cut_file(file, split_bytes), "replace", MAX_DOCUMENT_BYTES))
    documents = [document.decode() for batch in batches for document in batch.documents()]
    return documents, sum(batch.num_repaired for batch in batches)


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("split_bytes", [7, 10**9])
def test_a_mark_names_the_encoding_and_is_dropped(tmp_path, encoding: str, compress, split_bytes: int) -> None:  # type: ignore[no-untyped-def]
    ending = "" if compress is bytes else ".gz"
    text = "".join(TEXTS.values()) + "\ufeff 👍🏽"
    rows = [json.dumps({"text": each}, ensure_ascii=False) for each in DOCUMENTS]
    files = {
        "a.txt": (text, [text]),
        "b.jsonl": ("\r\n".join(rows), DOCUMENTS),
        "c.json": ("[\n" + ",\n".join(rows) + "]\n", DOCUMENTS),
    }
    for name, (content, expected) in files.items():
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(compress(MARKED[encoding] + content.encode(encoding)))
        assert read_all(Source(uri=str(path)), split_bytes) == expected


def test_a_mark_before_a_line_within_a_file_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "joined.jsonl").write_bytes((codecs.BOM_UTF8 + b'{"text": "a"}\n') * 3 + codecs.BOM_UTF8)
    assert read_all(Source(uri=str(tmp_path)), 10) == ["a"] * 3


def test_a_broken_character_of_utf16_is_repaired_and_counted(tmp_path: Path) -> None:
    text = TEXTS["fr"] * 3
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF16_LE + text.encode("utf-16-le") + b"\x00\xd8" + b"a\0" + b"b")
    assert read_replaced(tmp_path / "a.txt") == ([text + "\ufffda\ufffd"], 1)


@pytest.mark.parametrize(
    ("language", "encoding"),
    [("fr", "latin-1"), ("ru", "cp1251"), ("zh", "gb18030"), ("zh", "utf-16-be"), ("ja", "shift_jis")],
)
@pytest.mark.parametrize("count", [1, 50])
def test_text_in_another_encoding_is_refused(tmp_path: Path, language: str, encoding: str, count: int) -> None:
    (tmp_path / "a.txt").write_bytes((TEXTS[language] * count).encode(encoding))
    line = json.dumps({"text": TEXTS[language]}, ensure_ascii=False) + "\n"
    (tmp_path / "a.jsonl").write_bytes((line * count).encode(encoding))
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(ArtifactError, match=name):
            read_replaced(tmp_path / name, 100)


@pytest.mark.parametrize("split_bytes", [500, 10**9])
@pytest.mark.parametrize(("good_lines", "is_refused"), [(300, False), (50, True)])
def test_the_share_of_repaired_text_is_that_of_the_file_however_it_is_cut(
    tmp_path: Path, split_bytes: int, good_lines: int, is_refused: bool
) -> None:
    """Seven characters of each bad line are repaired, of 10,000 or 2,000 in the file."""
    lines = [b'{"text": "%s"}' % (b"x" * 33)] * good_lines + [
        b'{"text": "\xe9t\xe9 \xe0 la cr\xe8me br\xfbl\xe9e"}'
    ] * 5
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    if is_refused:
        with pytest.raises(ArtifactError, match=r"a\.jsonl"):
            read_replaced(tmp_path / "a.jsonl", split_bytes)
    else:
        documents, repaired = read_replaced(tmp_path / "a.jsonl", split_bytes)
        assert (len(documents), repaired) == (good_lines + 5, 5)


@pytest.mark.parametrize(("escapes", "replaced"), [(r"\ud800", "\ufffd"), (r"\udfff and \udc80", "\ufffd and \ufffd")])
def test_a_lone_surrogate_is_rejected_with_its_line_or_replaced(tmp_path: Path, escapes: str, replaced: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(GOOD) + b'\n{"text": "lone %s"}\n' % escapes.encode())

    with pytest.raises(ArtifactError, match=r"a\.jsonl:62: .*0x.. at 5 "):
        read_all(Source(uri=str(path)), 3_000)
    assert read_replaced(path) == ([*GOOD, f"lone {replaced}"], 1)


@pytest.mark.parametrize("writer", [pq.ParquetWriter, pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("split_bytes", [1, 10**6])
def test_a_broken_value_of_a_binary_column(tmp_path: Path, writer: Callable[..., Any], split_bytes: int) -> None:
    """Rows 48 and 51 of 60 in groups of 20 are not UTF-8."""
    values = [text.encode() for text in GOOD]
    values[47] = b"latin-1 caf\xe9"
    values[50] = "cut off €".encode()[:-1]
    path = tmp_path / ("a.parquet" if writer is pq.ParquetWriter else "a.arrow")
    write_table(path, pa.table({"text": pa.array(values, pa.binary())}), writer)

    with pytest.raises(ArtifactError, match=rf"{path.name}: row 48, column 'text': .*0xe9 at 11"):
        read_all(Source(uri=str(path)), split_bytes)
    expected = [value.decode("utf-8", "replace") for value in values]
    assert read_all(Source(uri=str(path)), split_bytes, invalid_utf8="replace") == expected
    bad_rows = BadRows("skip")
    assert read_all(Source(uri=str(path)), split_bytes, bad_rows=bad_rows) == GOOD[:47] + GOOD[48:50] + GOOD[51:]
    assert sum(file.rows["not UTF-8"] for file in bad_rows.files()) == 2
