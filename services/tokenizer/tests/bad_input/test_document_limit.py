"""`corpus.max_document_bytes` limits documents while files of all formats are read."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.recipe.schema import Source
from services.tokenizer.sources import document_limit
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl, write_arrow
from services.tokenizer.tests.bad_input.test_archives import ARTICLE, wikicorpus, write_archive
from services.tokenizer.tests.builders import REPOSITORY, decode_documents, make_text, published
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

    assert f"{name}:61 (at byte " in message if "jsonl" in name else f"{name}: row 61, column 'text'" in message
    assert f"corpus.max_document_bytes = {LIMIT:,}" in message
    assert stage.run(tmp_path / name, corpus__max_document_bytes=len(LONG) + 100, **settings) == 0
    assert decode_documents(published(stage.root).path, "train") == [text.encode() for text in [*TEXTS, LONG]]


def test_a_line_of_a_million_lists_is_named_and_not_parsed(stage: Stage, tmp_path: Path) -> None:
    """A parsed list takes 20 times its bytes. The same brackets in a string take no more than a text."""
    brackets = b"[]," * 500_000
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b'{"n": [' + brackets + b'0], "text": "x"}\n')
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__max_document_bytes=2**21)
    assert "a.jsonl:61 (at byte " in message
    assert "corpus.max_document_bytes" in message
    (tmp_path / "a.jsonl").write_bytes(jsonl([f'\\ "{brackets.decode()}']))
    assert read_all(Source(uri=str(tmp_path / "a.jsonl"))) == [f'\\ "{brackets.decode()}']


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
    assert "a.jsonl:1 (at byte 0)" in message


@pytest.mark.parametrize(
    ("article", "what"), [(LONG.replace("\n", " "), "a line"), ("one line of several\n" * 200, "an article")]
)
def test_an_article_or_a_line_of_wikicorpus_above_the_limit_is_named(
    stage: Stage, tmp_path: Path, article: str, what: str
) -> None:
    path = write_archive(tmp_path / "raw.en.tgz", "".join(ARTICLE % ("T", text) for text in (*TEXTS[:3], article)))
    message = stage.refuse(3, sources=wikicorpus(path), corpus__max_document_bytes=LIMIT)
    assert "raw.en.tgz: raw.en/englishText_0:" in message
    assert all(part in message for part in (what, "2,000 bytes"))


def test_values_that_share_their_text_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dictionaries, views and Parquet's difference encoding can repeat one text many times in little space."""
    monkeypatch.setattr(document_limit, "_LEAST_AT_ONCE", 2**20)  # so that small files reach the limit
    text, count = make_text(100_000).decode(), 300
    kept = pa.array([text], pa.string_view())
    _, views, data = kept.buffers()
    views = pa.py_buffer(np.tile(np.frombuffer(views, np.uint8)[:16], count).tobytes())
    shared = {
        "a.parquet": pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text]),
        "b.parquet": pa.array([text] * count),
        "a.arrow": pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), [text]),
        "b.arrow": pa.Array.from_buffers(pa.string_view(), count, [None, views, data]),
    }
    for name, column in shared.items():
        if name.endswith(".arrow"):
            stream(tmp_path / name, pa.table({"text": column}))
        else:
            encoding = {"text": "DELTA_BYTE_ARRAY"} if name == "b.parquet" else None
            settings: dict[str, Any] = {"use_dictionary": encoding is None, "column_encoding": encoding}
            pq.write_table(pa.table({"text": column}), tmp_path / name, **settings)
        [file] = list_inputs(Source(uri=str(tmp_path / name)))
        before, largest, found = pa.total_allocated_bytes(), 0, 0
        for batch in read_documents(cut_file(file, 10**9, 200_000), "reject", 200_000):
            largest = max(largest, pa.total_allocated_bytes() - before, batch.text_bytes)
            found += int((batch.sizes == len(text)).sum())
        assert found == count
        assert largest < 15_000_000  # of 30 million


# Files that declare or decompress to much more than they hold. A process reads them, and measures its peak memory.


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(400 * 2**20)


def gzip_of_one_line(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text": "') + gzip.compress(b"a" * 2**24, 1) * 12)


def archive_that_declares(kind: bytes, pax: dict[str, str], size: int = TERABYTE) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        entry = tarfile.TarInfo("raw.en/text")
        entry.size, entry.type, entry.pax_headers = size, kind, pax
        with path.open("wb") as file:
            file.write(entry.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT))
            file.write(b'<doc id="12">\n')
            file.truncate(TERABYTE)

    return write


def parquet_of_one_large_page(path: Path) -> None:
    text = "a" * (100 * 2**20)
    pq.write_table(table(["small", text, "small"]), path, compression="zstd", use_dictionary=False)


def arrow_of_one_large_buffer(path: Path) -> None:
    texts = table(["small", "a" * (100 * 2**20)])
    with pa.ipc.new_stream(str(path), texts.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(texts)


BOMBS: dict[str, Callable[[Path], None]] = {
    "sparse.txt": sparse_file,
    "sparse.jsonl": sparse_file,
    "line.jsonl.gz": gzip_of_one_line,
    "line.txt.gz": gzip_of_one_line,
    "member.tar": archive_that_declares(tarfile.REGTYPE, {}),
    "name.tar": archive_that_declares(tarfile.GNUTYPE_LONGNAME, {}),
    "pax.tar": archive_that_declares(tarfile.XHDTYPE, {}),
    "holes.tar": archive_that_declares(tarfile.GNUTYPE_SPARSE, {}),
    "pax-holes.tar": archive_that_declares(tarfile.REGTYPE, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    "page.parquet": parquet_of_one_large_page,
    "buffer.arrow": arrow_of_one_large_buffer,
}
READ_ALL = """
import sys
from pathlib import Path
from services.common.errors import MillraceError
from services.tokenizer.sources import document_limit
from services.tokenizer.sources.documents import cut_file, read_documents
from services.tokenizer.sources.file_range import InputFile
from services.tokenizer.sources.file_version import version_of_status

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

limit = int(sys.argv[1])
before = status("VmRSS")
for name in sys.argv[2:]:
    path = Path(name)
    kind = {".tar": "wikicorpus", ".gz": path.stem.rpartition(".")[2]}.get(path.suffix, path.suffix[1:])
    kind = {"txt": "text"}.get(kind, kind)
    file = InputFile(name, path.name, kind, "text", path.stat().st_size, version_of_status(path.stat()))
    try:
        for batch in read_documents(cut_file(file, 10**9, limit), "replace", limit):
            pass
        print("read", name)
    except MillraceError as error:
        print(error.exit_code, error)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_declares_more_than_the_limit_is_refused_in_little_memory(tmp_path: Path) -> None:
    for name, write in BOMBS.items():
        write(tmp_path / name)
    limit = 4 * 2**20
    command = [sys.executable, "-c", READ_ALL, str(limit), *(str(tmp_path / name) for name in BOMBS)]

    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)

    *refusals, growth = done.stdout.splitlines()
    for name, refusal in zip(BOMBS, refusals, strict=True):
        assert refusal.startswith(f"3 {tmp_path / name}:"), refusal
    assert int(growth) < 2 * 64 * 2**20


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "raw.en.tar"])
def test_a_file_of_a_terabyte_is_refused_before_it_is_hashed(stage: Stage, tmp_path: Path, name: str) -> None:
    """The file is sparse. Hashing it would take minutes."""
    if name == "raw.en.tar":
        archive_that_declares(tarfile.REGTYPE, {})(tmp_path / name)
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(TERABYTE)
    settings = {"sources": wikicorpus(tmp_path / name)} if name == "raw.en.tar" else {}
    assert name in stage.refuse(3, *(() if settings else [tmp_path / name]), **settings)


# Damaged archives


def header(name: str = "raw.en/text", **fields: bytes) -> bytes:
    """Make a member's header with the given fields, and with their checksum."""
    entry = tarfile.TarInfo(name)
    content = bytearray(entry.tobuf(tarfile.USTAR_FORMAT)[:512])
    places = {"size": (124, 136), "kind": (156, 157)}
    for field, value in fields.items():
        begin, end = places[field]
        content[begin:end] = value.ljust(end - begin, b"\0")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)


def pax(records: bytes) -> bytes:
    return header(kind=b"x", size=b"%o" % len(records)) + records.ljust(-(-len(records) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(size=b"-1"), "size"),
        (header(size=b"\xff" * 12), "negative"),
        (header(size=b"\x80" + b"\x7f" * 11), "63 bits"),
        (header(size=b"9999"), "size"),
        (header(kind=b"S", size=b"10"), "sparse"),
        (header(kind=b"2"), "link"),
        (header(kind=b"Q"), "b'Q'"),
        (header(kind=b"x", size=b"77777777777"), "8,589,934,591 bytes"),
        (pax(b"12 size=-50\n") + header(), "b'-50'"),
        (pax(b"9999 path=x\n") + header(), "length"),
        (pax(b"x path=x\n") + header(), "length"),
        (pax(b"22 GNU.sparse.major=1\n") + header(), "sparse"),
        (pax(b"19 GNU.sparse.map=\n") + header(), "sparse"),
        (pax(b"10 path=x\n") * 5_000, "header"),
        (b"x" * 512, "checksum"),
        (header(size=b"10"), "member"),
        (header(), "header"),
        (b"", "header"),
    ],
)
def test_a_damaged_header_of_an_archive_is_named_with_its_position(
    stage: Stage, tmp_path: Path, content: bytes, reason: str
) -> None:
    good = io.BytesIO()
    with tarfile.open(fileobj=good, mode="w") as archive:
        text = (ARTICLE % ("T", TEXTS[0])).encode()
        entry = tarfile.TarInfo("raw.en/first")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    first = good.getvalue()[: 512 + -(-len(text) // 512) * 512]
    (tmp_path / "raw.en.tar").write_bytes(first + content)

    message = stage.refuse(3, sources=wikicorpus(tmp_path / "raw.en.tar"))

    assert "raw.en.tar: " in message
    assert "at byte " in message
    assert reason in message


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


# Names that are not UTF-8


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
    assert "0xff at 7" in message
