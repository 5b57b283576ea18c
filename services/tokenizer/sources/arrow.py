"""Arrow IPC, the file format and the stream that `datasets` saves: a row is a document, read from one column."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, in_batches, row_of_file
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_seekable_file
from services.tokenizer.text_batch import TextBatch

_FILE_FORMAT = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


def cut(file: InputFile, split_bytes: int) -> list[FileRange]:
    """One file range a record batch; a stream cannot be entered half-way. Raises `RecipeError` for an unfit column."""
    with _open_arrow(file.uri) as reader:
        check_column(file, reader.schema)
        if not isinstance(reader, pa.RecordBatchFileReader):
            return [whole(file)]
        count = reader.num_record_batches
    return [FileRange(file, index, index + 1, file.bytes // count) for index in range(count)]


def read(file_range: FileRange) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document."""
    with _open_arrow(file_range.file.uri) as reader:
        if isinstance(reader, pa.RecordBatchFileReader):
            batches = (reader.get_batch(index) for index in range(file_range.begin, file_range.end))
        else:
            batches = iter(reader)
        for batch in batches:
            yield from in_batches(batch.column(file_range.file.column))


def locate(file_range: FileRange, number: int) -> str:
    """The row of a document, from 1 on."""
    with _open_arrow(file_range.file.uri) as reader:
        rows = [reader.get_batch(index).num_rows for index in range(file_range.begin)] if file_range.begin else []
    return row_of_file(file_range, sum(rows) + number)


@contextmanager
def _open_arrow(uri: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with open_seekable_file(uri) as file:
        begin = file.read(len(_FILE_FORMAT))
        is_file_format = begin == _FILE_FORMAT
        if begin.startswith(_CONTINUATION):
            _require_end(file, uri)
        file.seek(0)
        try:
            with pa.ipc.open_file(file) if is_file_format else pa.ipc.open_stream(file) as reader:
                yield reader
        except pa.ArrowException as error:
            raise ArtifactError(f"{uri}: not a readable Arrow file: {error}") from error


def _require_end(file: BinaryIO, uri: str) -> None:
    """Arrow takes a stream that was cut off between two batches for a whole one; every writer marks the end."""
    file.seek(-len(_END_OF_STREAM), os.SEEK_END)
    if file.read() != _END_OF_STREAM:
        raise ArtifactError(f"{uri}: an Arrow stream without its end: it is cut off, or still being written.")
