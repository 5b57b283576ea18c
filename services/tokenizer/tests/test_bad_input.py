"""Inputs that are damaged, of another kind, or changed while they are read: each is named, and nothing is published."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import logging
import lzma
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import ArtifactError
from services.common.recipe import Source
from services.common.recipe_file import load_recipe
from services.tokenizer.plan import make_plan
from services.tokenizer.sources.documents import cut_file, list_inputs, read_documents
from services.tokenizer.tests.builders import (
    decode_documents,
    is_anything_published,
    make_documents,
    make_text,
    published,
    run,
    write_model,
    write_recipe,
)
from services.tokenizer.vocabulary.provision import provide_vocabulary
from services.tokenizer.vocabulary.training import train_vocabulary

TEXTS = [document.decode() for document in make_documents(60)]
PIECES = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vocabulary"), PIECES)


class Stage:
    """The stage over one source, with a vocabulary that is given."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.root = folder, folder / "fsx"
        self._model, self._capsys = model, capsys

    def run(self, *uris: Path, **settings: Any) -> int:
        given: dict[str, Any] = {"tokenizer__model": str(self._model), "model__vocab_size": PIECES}
        recipe = write_recipe(self.folder, *uris, **(given | settings))
        self._capsys.readouterr()
        return run(recipe, self.root)

    def refuse(self, exit_code: int, *uris: Path, **settings: Any) -> str:
        """The message with which it ends."""
        assert self.run(*uris, **settings) == exit_code
        assert not is_anything_published(self.root)
        errors = self._capsys.readouterr().err
        assert errors.count("millrace: ") == 1
        assert "Traceback" not in errors
        return errors[errors.index("millrace: ") :]


@pytest.fixture
def stage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Stage:
    return Stage(tmp_path, model, capsys)


def jsonl(texts: Sequence[object]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, **settings: Any) -> pq.FileMetaData:
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, path, row_group_size=20, use_dictionary=False, **settings)
    return pq.read_metadata(path)


def write_arrow(path: Path, table: pa.Table, writer: Callable[..., Any], rows: int = 20) -> None:
    with writer(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=rows)


def overwrite(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def cut_off(path: Path, size: int) -> None:
    os.truncate(path, size)


# Parquet


def test_a_parquet_with_a_damaged_page_is_named(stage: Stage, tmp_path: Path) -> None:
    column = write_parquet(tmp_path / "a.parquet").row_group(1).column(1)
    overwrite(tmp_path / "a.parquet", column.data_page_offset + column.total_compressed_size // 2, b"\xff" * 40)
    assert "a.parquet: cannot be read: Corrupt snappy compressed data" in stage.refuse(3, tmp_path / "a.parquet")


def test_one_flipped_bit_in_a_parquet_with_checksums_is_noticed(stage: Stage, tmp_path: Path) -> None:
    """Without compression the page would still be readable, as other text."""
    metadata = write_parquet(tmp_path / "a.parquet", compression="none", write_page_checksum=True)
    position = metadata.row_group(1).column(1).data_page_offset + 1_000
    byte = (tmp_path / "a.parquet").read_bytes()[position]
    overwrite(tmp_path / "a.parquet", position, bytes([byte ^ 1]))

    message = stage.refuse(3, tmp_path / "a.parquet")

    assert "a.parquet" in message
    assert "CRC checksum verification failed" in message


def test_a_parquet_that_is_cut_off_is_named(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    cut_off(tmp_path / "a.parquet", (tmp_path / "a.parquet").stat().st_size - 100)
    assert "a.parquet: not a readable parquet file" in stage.refuse(3, tmp_path / "a.parquet")


def test_a_parquet_without_a_byte_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    assert "a.parquet: not a readable parquet file" in stage.refuse(3, tmp_path / "a.parquet")


def test_a_parquet_in_gzip_is_refused_with_a_way_out(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    message = stage.refuse(3, tmp_path / "b.parquet.gz")
    assert "b.parquet.gz: files of this format are read by position, and it is compressed. Decompress it." in message


def test_the_one_parquet_of_a_folder_that_lacks_the_column_is_named(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    write_parquet(folder / "0.parquet")
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), folder / "1.parquet")
    assert "1.parquet: no column 'text'; its columns are id, body" in stage.refuse(2, folder)


def test_a_column_that_a_parquet_has_twice_is_refused(stage: Stage, tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet: has 2 columns 'text', expected one" in stage.refuse(2, tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([["x"]]), "list<item: string>"),
        (pa.array([{"text": "x"}]), "struct<text: string>"),
        (pa.array([None]), "null"),
    ],
)
def test_a_column_that_holds_no_text_is_refused(stage: Stage, tmp_path: Path, column: pa.Array, found: str) -> None:
    table = pa.table({"text": column})
    pq.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table, pa.ipc.new_file)
    for name in ("a.parquet", "a.arrow"):
        message = stage.refuse(2, tmp_path / name)
        assert f"{name}: column 'text' is {found}" in message.replace("element:", "item:")


# Arrow


@pytest.mark.parametrize("writer", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_an_arrow_file_that_is_cut_off_is_named(
    stage: Stage, tmp_path: Path, writer: Callable[..., Any], share: float
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, pa.table({"text": TEXTS}), writer)
    cut_off(path, int(path.stat().st_size * share))
    assert "a.arrow: " in stage.refuse(3, path)


def test_an_arrow_stream_that_ends_between_two_batches_is_named(stage: Stage, tmp_path: Path) -> None:
    """What a killed writer leaves; Arrow reads it without a word."""
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table.slice(0, 30))
    assert len(pa.ipc.open_stream(tmp_path / "a.arrow").read_all()) == 30

    assert "a.arrow: an Arrow stream without its end: it is cut off" in stage.refuse(3, tmp_path / "a.arrow")


def test_offsets_that_point_out_of_an_arrow_file_are_not_followed(stage: Stage, tmp_path: Path) -> None:
    """Arrow would, and take the process down."""
    path = tmp_path / "a.arrow"
    write_arrow(path, pa.table({"text": TEXTS}), pa.ipc.new_stream, rows=len(TEXTS))
    ends = struct.pack("<2i", len(TEXTS[0]), len(TEXTS[0]) + len(TEXTS[1]))
    overwrite(path, path.read_bytes().index(ends), struct.pack("<2i", len(TEXTS[0]), 2**30))
    assert "a.arrow: not a readable Arrow file" in stage.refuse(3, path)


def test_a_dictionary_index_without_a_word_is_not_followed(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    indices = pa.array([7] * 50, pa.int32())
    words = pa.DictionaryArray.from_arrays(indices, pa.array(TEXTS[:8]))
    write_arrow(path, pa.table({"text": words}), pa.ipc.new_stream, rows=50)
    overwrite(path, path.read_bytes().index(struct.pack("<50i", *indices.to_pylist())) + 40, struct.pack("<i", 2**29))
    assert "a.arrow: not a readable Arrow file" in stage.refuse(3, path)


def test_an_arrow_file_without_the_column_is_named(stage: Stage, tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"title": ["x"], "body": ["y"]}), pa.ipc.new_stream)
    assert "a.arrow: no column 'text'; its columns are title, body" in stage.refuse(2, tmp_path / "a.arrow")


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


@pytest.mark.parametrize("ending", [".zst", ".bz2", ".lz4", ".xz"])
def test_compressed_lines_that_are_cut_off_are_named(stage: Stage, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    content = CODECS[ending](jsonl(TEXTS))
    for size in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert f"a.jsonl{ending}: cannot be read: " in stage.refuse(3, path)


@pytest.mark.parametrize("ending", CODECS)
def test_a_compressed_file_without_a_byte_is_cut_off(stage: Stage, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.txt{ending}").touch()
    assert f"a.txt{ending}: " in stage.refuse(3, tmp_path / f"a.txt{ending}")


@pytest.mark.parametrize("ending", [".zst", ".bz2", ".lz4", ".xz", ".zip"])
def test_a_file_that_only_its_name_says_is_compressed(stage: Stage, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.jsonl{ending}").write_bytes(jsonl(TEXTS))
    assert f"a.jsonl{ending}: cannot be read: " in stage.refuse(3, tmp_path / f"a.jsonl{ending}")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_a_flipped_bit_in_compressed_lines_is_noticed(stage: Stage, tmp_path: Path, ending: str) -> None:
    content = bytearray(CODECS[ending](jsonl(TEXTS)))
    content[len(content) // 2] ^= 8
    (tmp_path / f"a.jsonl{ending}").write_bytes(content)
    assert f"a.jsonl{ending}: cannot be read: " in stage.refuse(3, tmp_path / f"a.jsonl{ending}")


def test_no_file_of_a_zip_archive_is_left_out_in_silence(stage: Stage, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("0.jsonl", jsonl(TEXTS[:10]))
        archive.writestr("1.jsonl", jsonl(TEXTS[10:]))
    assert "a.jsonl.zip: a zip archive of 2 files, and one is read" in stage.refuse(3, tmp_path / "a.jsonl.zip")


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
        assert f"{name}:43: not JSON: Expecting property name enclosed in double quotes at character 2" in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x", "n": ' + b"1" * 5_000 + b"}", "Exceeds the limit"),
        (b'{"text": "x", "n": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "recursion"),
        (b'{"text": "x"} {"text": "y"}', "Extra data at character 15"),
        (b'{"text": "cut o', "Invalid control character at character 16"),
        (b"\0" * 100, "Expecting value at character 1"),
    ],
)
def test_a_line_that_no_json_reader_takes_is_named(stage: Stage, tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[:2]) + line + b"\n")
    message = stage.refuse(3, tmp_path / "a.jsonl")
    assert "a.jsonl:3: not JSON: " in message
    assert reason in message


@pytest.mark.parametrize(
    ("value", "found"), [({"en": "x"}, "dict"), (["x"], "list"), (True, "bool"), (1.5, "float"), (0, "int")]
)
def test_a_value_that_is_no_string_is_named_with_its_line(
    stage: Stage, tmp_path: Path, value: object, found: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([*TEXTS, value]))
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__split_bytes=2_000)
    assert f"a.jsonl:61: 'text' is {found}, expected a string" in message


# Text that is not UTF-8


SURROGATES = [r"\ud800", r"\udfff and \udc80", r"\udcc3\udca9"]
"""The last would be the bytes of an é, had they been bytes."""


def test_lone_surrogates_are_replaced_and_counted(stage: Stage, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%s %d"}\n' % (text.encode(), index) for index, text in enumerate(SURROGATES))
    (tmp_path / "a.jsonl").write_bytes(lines)

    assert stage.run(tmp_path / "a.jsonl") == 0

    corpus = published(stage.root)
    expected = ["\ufffd 0", "\ufffd and \ufffd 1", "\ufffd\ufffd 2"]
    assert [document.decode() for document in decode_documents(corpus.path, "train")] == expected
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 3


@pytest.mark.parametrize("text", SURROGATES)
def test_a_lone_surrogate_is_rejected_with_its_line(stage: Stage, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b'\n{"text": "lone %s"}\n' % text.encode())
    message = stage.refuse(3, tmp_path / "a.jsonl", corpus__invalid_utf8="reject", corpus__split_bytes=3_000)
    assert "a.jsonl:62 is not UTF-8: byte 0x" in message
    assert "at 5" in message
    assert 'corpus.invalid_utf8 = "replace"' in message


def write_binary_column(folder: Path, ending: str) -> Path:
    """60 rows in groups of 20, of which two are broken."""
    values = [text.encode() for text in TEXTS]
    values[47] = b"latin-1 caf\xe9"
    values[50] = "cut off €".encode()[:-1]
    table = pa.table({"text": pa.array(values, pa.binary())})
    path = folder / f"a{ending}"
    if ending == ".parquet":
        pq.write_table(table, path, row_group_size=20)
    else:
        write_arrow(path, table, pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream)
    return path.rename(path.with_suffix(".arrow")) if ending == ".stream" else path


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".stream"])
def test_a_broken_value_of_a_binary_column_is_replaced_and_counted(stage: Stage, tmp_path: Path, ending: str) -> None:
    assert stage.run(write_binary_column(tmp_path, ending)) == 0

    corpus = published(stage.root)
    documents = decode_documents(corpus.path, "train")
    assert (documents[47], documents[50]) == ("latin-1 caf\ufffd".encode(), "cut off \ufffd".encode())
    assert [document for index, document in enumerate(documents) if index not in (47, 50)] == [
        text.encode() for index, text in enumerate(TEXTS) if index not in (47, 50)
    ]
    assert corpus.manifest.corpus.documents_with_invalid_utf8 == 2


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".stream"])
@pytest.mark.parametrize("split_bytes", [1, 10**6])
def test_a_broken_value_of_a_binary_column_is_rejected_with_its_row(
    stage: Stage, tmp_path: Path, ending: str, split_bytes: int
) -> None:
    path = write_binary_column(tmp_path, ending)
    message = stage.refuse(3, path, corpus__invalid_utf8="reject", corpus__split_bytes=split_bytes)
    assert f"{path.name}: row 48, column 'text' is not UTF-8: byte 0xe9 at 11" in message


# Vocabularies


def test_a_vocabulary_file_without_a_byte_is_refused(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "empty.model").touch()
    message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "empty.model"))
    assert "empty.model: no vocabulary: neither a SentencePiece model" in message


def test_a_sentencepiece_model_that_is_cut_off_is_refused(stage: Stage, tmp_path: Path, model: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    content = model.read_bytes()
    for size in (1, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.model").write_bytes(content[:size])
        message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "cut.model"))
        assert "cut.model: no vocabulary: neither a SentencePiece model" in message


BORDERS = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "not a tokenizer.json of Hugging Face (KeyError('model'))"),
        ({"model": {"vocab": {"a": "x"}}}, "not a tokenizer.json of Hugging Face (TypeError"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}, "not a tokenizer.json of Hugging Face (KeyError"),
        ({"model": {"vocab": {}}}, "it has none"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": BORDERS}, "not a tokenizer.json that tokenizers"),
    ],
)
def test_json_that_is_no_vocabulary_is_refused(
    stage: Stage, tmp_path: Path, content: dict[str, object], reason: str
) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "other.json").write_text(json.dumps(content))
    message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "other.json"))
    assert "other.json: " in message
    assert reason in message


def test_a_tokenizer_json_that_is_cut_off_is_refused(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b"')
    message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "tokenizer.json"))
    assert "tokenizer.json: JSON, but not a tokenizer.json of Hugging Face" in message


def test_a_tokenizer_json_whose_borders_are_not_known_says_which_there_are(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    added = [{"id": index, "content": f"[{name}]"} for index, name in enumerate(("CLS", "SEP"), start=1)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    settings = {"tokenizer__model": str(tmp_path / "tokenizer.json")}

    message = stage.refuse(3, tmp_path / "a.parquet", **settings)

    assert "tokenizer.json: " in message
    assert "Set tokenizer.bos_token and tokenizer.eos_token to two of its special tokens: [CLS], [SEP]." in message
    wrong = {"tokenizer__bos_token": "[CLS]", "tokenizer__eos_token": "[END]"}
    assert "two of its special tokens" in stage.refuse(3, tmp_path / "a.parquet", **settings, **wrong)


def tiktoken_lines(ranks: Sequence[int]) -> bytes:
    return b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % rank for byte, rank in enumerate(ranks))


@pytest.mark.parametrize(
    "content",
    [
        tiktoken_lines([rank + (rank > 100) for rank in range(256)]),
        tiktoken_lines(range(256))[:-3],
        tiktoken_lines(range(200)),
        tiktoken_lines([0, 1, 1, *range(3, 256)]),
    ],
    ids=["a gap", "cut off", "bytes without a token", "a rank twice"],
)
def test_a_tiktoken_file_that_is_not_whole_is_refused(stage: Stage, tmp_path: Path, content: bytes) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.tiktoken").write_bytes(content)
    message = stage.refuse(3, tmp_path / "a.parquet", tokenizer__model=str(tmp_path / "a.tiktoken"))
    assert "a.tiktoken: Not a whole tiktoken file: its ranks have gaps, or a byte is no token." in message


# Inputs that change


@contextmanager
def before_encoding(act: Callable[[], object]) -> Iterator[None]:
    """Do something when the stage, which has planned and has its vocabulary, says how it will encode."""
    logger = logging.getLogger("services.tokenizer.build")

    def notice(record: logging.LogRecord) -> bool:
        act()
        return True

    logger.addFilter(notice)
    try:
        yield
    finally:
        logger.removeFilter(notice)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(jsonl(["one more line"]))


def replace_by_another_of_the_same_size(path: Path) -> None:
    """With the old time of change too, as a restored backup has."""
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b"the", b"eht"))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_size == status.st_size


def write_in_place(path: Path) -> None:
    overwrite(path, 30, b"X")


@pytest.mark.parametrize("change", [append, replace_by_another_of_the_same_size, write_in_place])
@pytest.mark.parametrize("split_bytes", [2_000, 10**6])
def test_an_input_that_changes_between_plan_and_encode_is_named(
    stage: Stage, tmp_path: Path, change: Callable[[Path], None], split_bytes: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    with before_encoding(lambda: change(tmp_path / "a.jsonl")):
        message = stage.refuse(3, tmp_path / "a.jsonl", corpus__split_bytes=split_bytes)
    assert "a.jsonl: changed while the corpus was made from it, so nothing was published" in message

    assert stage.run(tmp_path / "a.jsonl", corpus__split_bytes=split_bytes) == 0


def test_an_input_that_loses_its_end_while_it_is_read_has_changed_and_is_not_just_damaged(
    stage: Stage, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "a.parquet")
    with before_encoding(lambda: cut_off(tmp_path / "a.parquet", 1_000)):
        assert "a.parquet: changed while the corpus was made" in stage.refuse(3, tmp_path / "a.parquet")


def test_an_input_that_is_removed_before_it_is_read_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    with before_encoding((tmp_path / "a.jsonl").unlink):
        message = stage.refuse(3, tmp_path / "a.jsonl")
    assert "a.jsonl: cannot be read: No such file or directory" in message


def test_an_input_that_is_written_while_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([make_text(1_000_000, seed=seed).decode() for seed in range(6)]))
    [file] = list_inputs(Source(uri=str(tmp_path / "a.jsonl")))
    batches = read_documents(cut_file(file, 10**9), "replace")
    assert len(next(batches)) >= 4
    append(tmp_path / "a.jsonl")
    with pytest.raises(ArtifactError, match=r"a\.jsonl: changed while"):
        list(batches)


def test_a_copy_with_the_same_content_is_the_same_input(stage: Stage, tmp_path: Path) -> None:
    """Such as the one that each node of a cluster has in its image."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS))

    def copy() -> None:
        (tmp_path / "copy").write_bytes(path.read_bytes())
        (tmp_path / "copy").replace(path)

    with before_encoding(copy):
        assert stage.run(path, corpus__split_bytes=2_000) == 0
    assert decode_documents(published(stage.root).path, "train") == [text.encode() for text in TEXTS]


def test_a_vocabulary_that_changes_after_the_plan_is_not_taken(tmp_path: Path, model: Path) -> None:
    """The corpus's id says which it is."""
    write_parquet(tmp_path / "a.parquet")
    given = tmp_path / "given.model"
    given.write_bytes(model.read_bytes())
    recipe = load_recipe(
        write_recipe(tmp_path, tmp_path / "a.parquet", tokenizer__model=str(given), model__vocab_size=PIECES)
    )
    plan = make_plan(recipe)
    given.write_bytes(train_vocabulary(make_documents(60, seed=9), PIECES))
    with pytest.raises(ArtifactError, match=r"given\.model: changed since the corpus was planned"):
        provide_vocabulary(recipe, plan, tmp_path)


# wikicorpus


ARTICLE = '<doc id="12" title="%s" nonfiltered="1" processed="1" dbindex="0">\n%s\n\nENDOFARTICLE.\n</doc>\n'


def write_archive(path: Path, *members: str, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for number, text in enumerate(members):
            entry = tarfile.TarInfo(f"raw.en/englishText_{number}")
            entry.size = len(text.encode("latin-1"))
            archive.addfile(entry, io.BytesIO(text.encode("latin-1")))
    return path


def wikicorpus(path: Path) -> str:
    return f'[[corpus.sources]]\nuri = "{path}"\nformat = "wikicorpus"\n'


ARTICLES = [ARTICLE % (f"Title {number}", text) for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_wikicorpus_archive_that_is_cut_off_is_named(stage: Stage, tmp_path: Path, share: float) -> None:
    path = write_archive(tmp_path / "raw.en.tgz", "".join(ARTICLES[:30]), "".join(ARTICLES[30:]))
    cut_off(path, int(path.stat().st_size * share))
    assert "raw.en.tgz: cannot be read: Truncated compressed stream" in stage.refuse(3, sources=wikicorpus(path))


def test_a_wikicorpus_archive_whose_checksum_does_not_fit_is_named(stage: Stage, tmp_path: Path) -> None:
    """It comes behind the zeros with which an archive ends, where a reader of archives has seen enough."""
    archive = write_archive(tmp_path / "raw.en.tar", "".join(ARTICLES), mode="w")
    path = tmp_path / "raw.en.tgz"
    path.write_bytes(gzip.compress(archive.read_bytes() + bytes(3 * 2**20)))
    overwrite(path, path.stat().st_size - 8, b"\0\0\0\0")
    assert "raw.en.tgz: cannot be read: " in stage.refuse(3, sources=wikicorpus(path))


def test_a_wikicorpus_archive_that_is_no_archive_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "raw.en.tgz").write_bytes(gzip.compress("".join(ARTICLES).encode()))
    message = stage.refuse(3, sources=wikicorpus(tmp_path / "raw.en.tgz"))
    assert "raw.en.tgz: not a readable tar archive" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ARTICLES[0] + ARTICLES[1].replace("</doc>\n", ""), "ends within an article"),
        (ARTICLES[0].replace("</doc>\n", "") + ARTICLES[1], "an article begins in another"),
        (ARTICLES[0] + "nobody's line\n", "text outside of an article: b\"nobody's line"),
    ],
)
def test_a_wikicorpus_member_without_whole_articles_is_named_with_its_line(
    stage: Stage, tmp_path: Path, text: str, reason: str
) -> None:
    path = write_archive(tmp_path / "raw.en.tgz", "".join(ARTICLES[2:]), text)
    message = stage.refuse(3, sources=wikicorpus(path))
    assert "raw.en.tgz: raw.en/englishText_1:" in message
    assert reason in message
