"""Reads Arrow IPC files and streams, where a row is a document. `datasets` saves streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.column import explaining_damage, find_column, read_column, row_of_file
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_seekable_file
from services.tokenizer.sources.file_version import require_unchanged
from services.tokenizer.text_batch import TextBatch

_FILE_FORMAT = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return a file range for each record batch of a file, or the whole stream, which can only be read from its begin.

    Raises `RecipeError` for a column that is missing or holds no text in a file with rows, and `ArtifactError` for a
    file that has changed: the record batches are kept for repeated commands, which may find the listed version again.
    """
    with require_unchanged(file), _open_arrow(file.uri) as reader:
        try:
            find_column(file, reader.schema)
        except RecipeError:
            if any(batch.num_rows for batch in _read_batches(reader)):
                raise
            return []
        if isinstance(reader, pa.RecordBatchStreamReader):
            return [whole(file)]
        count = reader.num_record_batches
    return [FileRange(file, index, index + 1, file.bytes // count) for index in range(count)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values as documents. A null is an empty document. A record batch is decoded as a whole."""
    with _open_arrow(file_range.file.uri) as reader:
        path = find_column(file_range.file, reader.schema)
        for batch in _read_batches(reader, file_range.begin, file_range.end):
            yield from read_column(batch, path)


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    rows = 0
    if file_range.begin:
        with _open_arrow(file_range.file.uri) as reader:
            rows = sum(batch.num_rows for batch in _read_batches(reader, 0, file_range.begin))
    return row_of_file(file_range, rows + number)


def _read_batches(
    reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader, begin: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of a file, or all of a stream."""
    if isinstance(reader, pa.RecordBatchStreamReader):
        yield from reader
        return
    for index in range(begin, reader.num_record_batches if end is None else end):
        yield reader.get_batch(index)


@contextmanager
def _open_arrow(uri: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with open_seekable_file(uri) as file, explaining_damage(uri, "Arrow"):
        begin = file.read(len(_FILE_FORMAT))
        if begin == _FILE_FORMAT:
            yield pa.ipc.open_file(file)
            return
        # Streams of Arrow 0.15 or later begin with this, and have a mark at their end.
        if begin.startswith(_CONTINUATION):
            _require_end(file, uri)
        file.seek(0)
        yield pa.ipc.open_stream(file)


def _require_end(file: BinaryIO, uri: str) -> None:
    """Raise `ArtifactError` for a stream without the mark of its end. Arrow reads such a stream without an error."""
    file.seek(-len(_END_OF_STREAM), os.SEEK_END)
    if file.read() != _END_OF_STREAM:
        raise ArtifactError(f"{uri}: the Arrow stream has no end: it is cut off, or still being written.")
