"""Parquet and Arrow files that are damaged or cut off, or that lack the column of text, are refused by name."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.tokenizer.tests.bad_input.stage import TEXTS, Stage, cut_off, overwrite, write_arrow, write_parquet

# Parquet


def test_a_parquet_with_a_damaged_page_is_named(stage: Stage, tmp_path: Path) -> None:
    column = write_parquet(tmp_path / "a.parquet").row_group(1).column(1)
    overwrite(tmp_path / "a.parquet", column.data_page_offset + column.total_compressed_size // 2, b"\xff" * 40)
    assert "a.parquet: " in stage.refuse(3, tmp_path / "a.parquet")


def test_one_flipped_bit_in_a_parquet_with_checksums_is_noticed(stage: Stage, tmp_path: Path) -> None:
    """The page is not compressed, so it can be read as other text."""
    metadata = write_parquet(tmp_path / "a.parquet", compression="none", write_page_checksum=True)
    position = metadata.row_group(1).column(1).data_page_offset + 1_000
    byte = (tmp_path / "a.parquet").read_bytes()[position]
    overwrite(tmp_path / "a.parquet", position, bytes([byte ^ 1]))

    message = stage.refuse(3, tmp_path / "a.parquet")

    assert "a.parquet: " in message
    assert "CRC checksum" in message


def test_a_parquet_that_is_cut_off_is_named(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    cut_off(tmp_path / "a.parquet", (tmp_path / "a.parquet").stat().st_size - 100)
    assert "a.parquet: " in stage.refuse(3, tmp_path / "a.parquet")


def test_a_parquet_without_a_byte_is_named(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    assert "a.parquet: " in stage.refuse(3, tmp_path / "a.parquet")


def test_a_parquet_in_gzip_is_refused(stage: Stage, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert "b.parquet.gz: " in stage.refuse(3, tmp_path / "b.parquet.gz")


def test_the_one_parquet_of_a_folder_that_lacks_the_column_is_named(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    write_parquet(folder / "0.parquet")
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), folder / "1.parquet")
    message = stage.refuse(2, folder)
    assert all(part in message for part in ("1.parquet: ", "'text'", "id, body", "`column`"))


def test_a_column_that_a_parquet_has_twice_is_refused(stage: Stage, tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    message = stage.refuse(2, tmp_path / "a.parquet")
    assert all(part in message for part in ("a.parquet: ", "2 columns", "'text'"))


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([["x"]]), "list<item: string>"),
        (pa.array([{"text": "x"}]), "struct<text: string>"),
        (pa.array([1, 2]), "int64"),
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
    """A killed writer leaves such a file, and Arrow reads it without an error."""
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table.slice(0, 30))
    assert len(pa.ipc.open_stream(tmp_path / "a.arrow").read_all()) == 30

    assert "a.arrow: " in stage.refuse(3, tmp_path / "a.arrow")


def test_offsets_that_point_out_of_an_arrow_file_are_not_followed(stage: Stage, tmp_path: Path) -> None:
    """Arrow would follow them, and the process would crash."""
    path = tmp_path / "a.arrow"
    write_arrow(path, pa.table({"text": TEXTS}), pa.ipc.new_stream, rows=len(TEXTS))
    ends = struct.pack("<2i", len(TEXTS[0]), len(TEXTS[0]) + len(TEXTS[1]))
    overwrite(path, path.read_bytes().index(ends), struct.pack("<2i", len(TEXTS[0]), 2**30))
    assert "a.arrow: " in stage.refuse(3, path)


def test_a_dictionary_index_without_a_word_is_not_followed(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    indices = pa.array([7] * 50, pa.int32())
    words = pa.DictionaryArray.from_arrays(indices, pa.array(TEXTS[:8]))
    write_arrow(path, pa.table({"text": words}), pa.ipc.new_stream, rows=50)
    overwrite(path, path.read_bytes().index(struct.pack("<50i", *indices.to_pylist())) + 40, struct.pack("<i", 2**29))
    assert "a.arrow: " in stage.refuse(3, path)


def test_an_arrow_file_without_the_column_is_named(stage: Stage, tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"title": ["x"], "body": ["y"]}), pa.ipc.new_stream)
    message = stage.refuse(2, tmp_path / "a.arrow")
    assert all(part in message for part in ("a.arrow: ", "'text'", "title, body"))
