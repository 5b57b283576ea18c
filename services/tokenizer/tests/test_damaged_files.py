"""Files that are damaged, cut off or changed, and rows that do not fit the recipe, are refused by name and place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Source
from services.tokenizer import build
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import cut_file, list_inputs
from services.tokenizer.tests.builders import (
    ARTICLE,
    TEXTS,
    Stage,
    compress_with_arrow,
    decode_documents,
    jsonl,
    make_text,
    make_wikicorpus,
    published,
    read_all,
    write_table,
)

ARTICLES = [ARTICLE % (f"Title {number}", text) for number, text in enumerate(TEXTS)]
CUT_ARTICLE = ARTICLES[1].replace("</doc>\n", "")


CODECS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": partial(compress_with_arrow, codec="zstd"),
    ".bz2": bz2.compress,
    ".lz4": partial(compress_with_arrow, codec="lz4"),
    ".xz": lzma.compress,
}


def source(path: Path) -> Source:
    return Source(uri=str(path), format="wikicorpus" if path.suffix in (".tar", ".tgz") else "auto")


def written(write: Callable[[Path], object], folder: Path, name: str) -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def parquet(folder: Path, **settings: Any) -> bytes:
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    write = partial(pq.write_table, table, row_group_size=20, use_dictionary=False, **settings)
    return written(write, folder, "made.parquet")


def flipped_in_parquet(folder: Path) -> bytes:
    """Flip a bit of a page that is not compressed, which can be read as other text."""
    content = bytearray(parquet(folder, compression="none", write_page_checksum=True))
    content[pq.read_metadata(folder / "made.parquet").row_group(1).column(1).data_page_offset + 1_000] ^= 1
    return bytes(content)


def arrow(folder: Path, writer: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    table = pa.table({"text": TEXTS})
    return written(lambda path: write_table(path, table, writer), folder, "made.arrow")


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
    ("cut.tgz", lambda _: _cut(make_wikicorpus(*ARTICLES), 0.9)),
    # The checksum of gzip follows the archive's padding, which a reader of archives need not read.
    ("checksum.tgz", lambda _: gzip.compress(make_wikicorpus(*ARTICLES, mode="w") + bytes(2**20))[:-8] + bytes(8)),
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
        ("a.tgz", make_wikicorpus("".join(ARTICLES), CUT_ARTICLE), "a.tgz: raw.en/englishText_1:"),
        ("a.tgz", make_wikicorpus(CUT_ARTICLE + ARTICLES[2]), "a.tgz: raw.en/englishText_0:"),
        ("a.tgz", make_wikicorpus(ARTICLES[0] + "nobody's line\n"), "a.tgz: raw.en/englishText_0:"),
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
    parquet(tmp_path)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        with pytest.raises(RecipeError, match=f"{name}: .*{found}"):
            read_all(source(tmp_path / name))
    with pytest.raises(RecipeError, match=r"a\.parquet"):
        read_all(source(tmp_path))


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
    "raw.tgz": lambda path: path.write_bytes(make_wikicorpus("".join(ARTICLE % ("T", text) for text in ALL))),
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
    with path.open("r+b") as file:
        file.seek(30)
        file.write(b"X")


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
