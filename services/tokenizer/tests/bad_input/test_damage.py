"""Files that are damaged, cut off, or do not fit the recipe are refused by name and place."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.tests.bad_input.stage import TEXTS, jsonl, write_parquet, write_table
from services.tokenizer.tests.builders import read_all

ARTICLE = '<doc id="12" title="%s" nonfiltered="1" processed="1" dbindex="0">\n%s\n\nENDOFARTICLE.\n</doc>\n'
ARTICLES = [ARTICLE % (f"Title {number}", text) for number, text in enumerate(TEXTS)]
CUT_ARTICLE = ARTICLES[1].replace("</doc>\n", "")


def arrow_compressed(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


CODECS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": partial(arrow_compressed, codec="zstd"),
    ".bz2": bz2.compress,
    ".lz4": partial(arrow_compressed, codec="lz4"),
    ".xz": lzma.compress,
}


def source(path: Path) -> Source:
    return Source(uri=str(path), format="wikicorpus" if path.suffix in (".tar", ".tgz") else "auto")


def written(write: Callable[[Path], object], folder: Path, name: str) -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def parquet(folder: Path, **settings: Any) -> bytes:
    return written(partial(write_parquet, **settings), folder, "made.parquet")


def flipped_in_parquet(folder: Path) -> bytes:
    """Flip a bit of a page that is not compressed, which can be read as other text."""
    content = bytearray(parquet(folder, compression="none", write_page_checksum=True))
    content[pq.read_metadata(folder / "made.parquet").row_group(1).column(1).data_page_offset + 1_000] ^= 1
    return bytes(content)


def arrow(folder: Path, writer: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    table = pa.table({"text": TEXTS})
    return written(lambda path: write_table(path, table, writer), folder, "made.arrow")


def archive(*members: str, mode: str = "w:gz") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as made:  # type: ignore[call-overload]
        for number, text in enumerate(members):
            entry = tarfile.TarInfo(f"raw.en/englishText_{number}")
            entry.size = len(text.encode("latin-1"))
            made.addfile(entry, io.BytesIO(text.encode("latin-1")))
    return sink.getvalue()


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :]


LINES = jsonl(TEXTS)
DAMAGED: list[tuple[str, Callable[[Path], bytes]]] = [
    ("empty.parquet", lambda _: b""),
    ("cut.parquet", lambda folder: parquet(folder)[:-100]),
    ("page.parquet", lambda folder: parquet(folder).replace(parquet(folder)[2_000:2_040], b"\xff" * 40)),
    ("flipped.parquet", flipped_in_parquet),
    ("packed.parquet.gz", lambda folder: gzip.compress(parquet(folder))),
    ("empty.arrow", lambda _: b""),
    ("cut-file.arrow", lambda folder: _cut(arrow(folder, pa.ipc.new_file), 0.5)),
    ("cut-stream.arrow", lambda folder: _cut(arrow(folder), 0.5)),
    # A killed writer leaves a stream without the mark of its end, and Arrow reads it without an error.
    ("open.arrow", lambda folder: arrow(folder)[:-8]),
    ("cut.tgz", lambda _: _cut(archive(*ARTICLES), 0.9)),
    # The checksum of gzip follows the archive's padding, which a reader of archives need not read.
    ("checksum.tgz", lambda _: gzip.compress(archive(*ARTICLES, mode="w") + bytes(2**20))[:-8] + bytes(8)),
    ("no-archive.tgz", lambda _: gzip.compress("".join(ARTICLES).encode())),
    *((f"empty.jsonl{ending}", lambda _: b"") for ending in CODECS),
    *((f"plain.jsonl{ending}", lambda _: LINES) for ending in CODECS),
    *((f"cut.jsonl{ending}", lambda _, pack=pack: pack(LINES)[:-1]) for ending, pack in CODECS.items()),
    *((f"bit.jsonl{ending}", lambda _, e=ending: flipped(CODECS[e](LINES), 900)) for ending in (".gz", ".bz2", ".xz")),
]  # fmt: skip


def _cut(content: bytes, share: float) -> bytes:
    return content[: int(len(content) * share)]


@pytest.mark.parametrize(("name", "make"), DAMAGED, ids=[name for name, _ in DAMAGED])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, make: Callable[[Path], bytes]) -> None:
    (tmp_path / "given").mkdir()
    path = tmp_path / "given" / name
    path.write_bytes(make(tmp_path))
    with pytest.raises(ArtifactError, match=name):
        read_all(source(path), bad_rows=BadRows("skip"))  # no row is to blame


def bad_line(line: bytes) -> bytes:
    return b"".join([*LINES.splitlines(keepends=True)[:20], b"\n  \n", line, b"\n", LINES])


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", bad_line(b"{'text': 'single quotes'}"), "a.jsonl:23: .*character 2"),
        ("a.jsonl.gz", gzip.compress(bad_line(b"{'text': 'single quotes'}")), "a.jsonl.gz:23: .*character 2"),
        ("a.jsonl", bad_line(b'{"text": ["x"]}'), "a.jsonl:23: 'text' is list"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', "a.json"),
        ("a.json", b'[{"text": "a"}] [{"text": "b"}]', "a.json"),
        ("a.tgz", archive("".join(ARTICLES), CUT_ARTICLE), "a.tgz: raw.en/englishText_1:"),
        ("a.tgz", archive(CUT_ARTICLE + ARTICLES[2]), "a.tgz: raw.en/englishText_0:"),
        ("a.tgz", archive(ARTICLES[0] + "nobody's line\n"), "a.tgz: raw.en/englishText_0:"),
    ],
)
@pytest.mark.parametrize("split_bytes", [500, 10**9])
def test_a_bad_row_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, place: str, split_bytes: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=place):
        read_all(source(tmp_path / name), split_bytes)


TWICE = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (pa.table({"id": [1], "body": ["x"]}), "'text'.* id, body"),
        (TWICE, "'text'.* text, text"),
        (pa.table({"text": [["x"]]}), "list<"),
        (pa.table({"text": [{"en": "x"}]}), "text.en"),
        (pa.table({"text": [1, 2]}), "int64"),
    ],
)
def test_a_column_that_is_missing_or_holds_no_text_is_refused(tmp_path: Path, table: pa.Table, found: str) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    write_table(tmp_path / "b.arrow", table, pa.ipc.new_file)
    write_table(tmp_path / "c.arrow", table, pa.ipc.new_stream)
    write_parquet(tmp_path / "good.parquet")
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        with pytest.raises(RecipeError, match=f"{name}: .*{found}"):
            read_all(source(tmp_path / name))
    with pytest.raises(RecipeError, match=r"a\.parquet"):
        read_all(source(tmp_path))
