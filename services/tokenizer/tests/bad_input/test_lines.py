"""JSON lines that cannot be read, plain or compressed, are refused with their place."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, jsonl

# Compressed files


def zstd(content: bytes) -> bytes:
    return compressed(content, "zstd")


def lz4(content: bytes) -> bytes:
    return compressed(content, "lz4")


def compressed(content: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


CODECS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".lz4": lz4,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("ending", CODECS)
def test_compressed_lines_that_are_cut_off_are_named(stage: Stage, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    content = CODECS[ending](jsonl(TEXTS))
    for size in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert f"a.jsonl{ending}: " in stage.refuse(3, path)


@pytest.mark.parametrize("ending", CODECS)
def test_a_compressed_file_without_a_byte_is_cut_off(stage: Stage, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.txt{ending}").touch()
    assert f"a.txt{ending}: " in stage.refuse(3, tmp_path / f"a.txt{ending}")


@pytest.mark.parametrize("ending", [*CODECS, ".zip"])
def test_a_file_that_only_its_name_says_is_compressed(stage: Stage, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.jsonl{ending}").write_bytes(jsonl(TEXTS))
    assert f"a.jsonl{ending}: " in stage.refuse(3, tmp_path / f"a.jsonl{ending}")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_a_flipped_bit_in_compressed_lines_is_noticed(stage: Stage, tmp_path: Path, ending: str) -> None:
    content = bytearray(CODECS[ending](jsonl(TEXTS)))
    content[len(content) // 2] ^= 8
    (tmp_path / f"a.jsonl{ending}").write_bytes(content)
    assert f"a.jsonl{ending}: " in stage.refuse(3, tmp_path / f"a.jsonl{ending}")


def test_a_zip_archive_of_two_files_is_refused(stage: Stage, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("0.jsonl", jsonl(TEXTS[:10]))
        archive.writestr("1.jsonl", jsonl(TEXTS[10:]))
    message = stage.refuse(3, tmp_path / "a.jsonl.zip")
    assert all(part in message for part in ("a.jsonl.zip: ", "2 files"))


# JSON lines


def test_the_line_that_is_not_json_is_counted_in_the_file_however_it_is_stored_and_cut(
    stage: Stage, tmp_path: Path
) -> None:
    lines = jsonl(TEXTS).splitlines(keepends=True)
    content = b"".join([*lines[:20], b"\n  \n", *lines[20:40], b"{'text': 'single quotes'}\n", *lines[40:]])
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        message = stage.refuse(3, tmp_path / name, corpus__split_bytes=500)
        assert all(part in message for part in (f"{name}:43: ", "character 2"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x", "n": ' + b"1" * 5_000 + b"}", "digits"),
        (b'{"text": "x", "n": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "recursion"),
        (b'{"text": "x"} {"text": "y"}', "character 15"),
        (b'{"text": "cut o', "character 16"),
        (b"\0" * 100, "character 1"),
    ],
)
def test_a_line_that_no_json_reader_takes_is_named(stage: Stage, tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[:2]) + line + b"\n")
    message = stage.refuse(3, tmp_path / "a.jsonl")
    assert "a.jsonl:3: " in message
    assert reason in message


@pytest.mark.parametrize(
    ("value", "found"), [({"en": "x"}, "dict"), (["x"], "list"), (True, "bool"), (1.5, "float"), (0, "int")]
)
def test_a_value_that_is_no_string_is_named_with_its_line(
    stage: Stage, tmp_path: Path, value: object, found: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([*TEXTS, value]))
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__split_bytes=2_000)
    assert all(part in message for part in ("a.jsonl:61: ", "'text'", found))
