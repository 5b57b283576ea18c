"""Reads a column of text from Parquet, and from Arrow IPC files and streams: a row is a document, a null an empty one.

Parquet is cut by row groups and an Arrow file by record batches. A stream, which `datasets` saves, is read as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.file_system import open_seekable_file, require_unchanged
from services.tokenizer.sources.input_files import FileRange, InputFile, whole_file
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

_LARGE_ROW_BYTES = 2**18
_BUFFER_BYTES = 2**20
_FILE_FORMAT = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


def cut_parquet(file: InputFile, split_bytes: int) -> list[FileRange]:
    """Return a file range for each row group. A file without rows has none, whatever its columns are.

    Raises `RecipeError` when the column is missing or holds no text, and `ArtifactError` for a file that has changed.
    """
    with require_unchanged(file), _open_parquet(file.uri) as parquet:
        if not parquet.metadata.num_rows:
            return []
        path = ".".join(find_column(file, parquet.schema_arrow))
        columns = [parquet.schema.column(index).path for index in range(len(parquet.schema))]
        sizes = [
            parquet.metadata.row_group(group).column(columns.index(path)).total_uncompressed_size
            for group in range(parquet.num_row_groups)
        ]
    return [FileRange(file, index, index + 1, size) for index, size in enumerate(sizes)]


def read_parquet(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values as documents. A page is decoded as a whole."""
    groups = range(file_range.begin, file_range.end)
    with _open_parquet(file_range.file.uri) as parquet:
        path = find_column(file_range.file, parquet.schema_arrow)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        # One row at a time where rows are large, because some may be much larger.
        mean_bytes = max(1, file_range.bytes / max(rows, 1))
        batches = parquet.iter_batches(
            batch_size=1 if mean_bytes > _LARGE_ROW_BYTES else int(BATCH_BYTES / mean_bytes),
            row_groups=list(groups),
            columns=[".".join(path)],
            use_threads=False,
        )
        for batch in batches:
            yield from read_column(batch, path)


def locate_in_parquet(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    with _open_parquet(file_range.file.uri) as parquet:
        rows = sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.begin))
    return locate_row(file_range, rows + number)


def cut_arrow(file: InputFile, split_bytes: int) -> list[FileRange]:
    """Return a file range for each record batch of a file, or the whole stream. Raises as `cut_parquet` does."""
    with require_unchanged(file), _open_arrow(file.uri) as reader:
        find_column(file, reader.schema)
        if isinstance(reader, pa.RecordBatchStreamReader):
            return [whole_file(file)]
        count = reader.num_record_batches
    return [FileRange(file, index, index + 1, file.bytes // count) for index in range(count)]


def read_arrow(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values as documents. A record batch is decoded as a whole."""
    with _open_arrow(file_range.file.uri) as reader:
        path = find_column(file_range.file, reader.schema)
        is_stream = isinstance(reader, pa.RecordBatchStreamReader)
        for batch in reader if is_stream else map(reader.get_batch, range(file_range.begin, file_range.end)):
            yield from read_column(batch, path)


def locate_in_arrow(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    with _open_arrow(file_range.file.uri) as reader:
        rows = sum(reader.get_batch(index).num_rows for index in range(file_range.begin))
    return locate_row(file_range, rows + number)


def locate_row(file_range: FileRange, row: int) -> str:
    """Return a row's place for an error. `row` counts the rows of the file from 0."""
    column = file_range.file.column
    return f"{file_range.file.uri}: row {row + 1:,}" + (f", column {column!r}" if column else "")


def find_column(file: InputFile, schema: pa.Schema) -> tuple[str, ...]:
    """Return the names that lead to the file's column: one, or several where `a.b` is the field b of the struct a.

    Raises `RecipeError` when the column is missing, exists twice, or holds no text.
    """
    path, found = follow(file.column, schema)
    if found is None:
        raise RecipeError(
            f"{file.uri}: expected one column {file.column!r}, and the columns are "
            f"{', '.join(name for name, _ in _paths(schema)) or 'none'}. Set `column` to the one that holds the text."
        )
    if not _is_text(found):
        fields = _paths(found) if pa.types.is_struct(found) else ()
        inner = ", ".join(f"{file.column}.{name}" for name, kind in fields if _is_text(kind))
        advice = f"Set `column` to one of {inner}" if inner else "Read it as `datasets://FOLDER` with a `template`"
        raise RecipeError(f"{file.uri}: column {file.column!r} is {found}, expected text. {advice}.")
    return path


def follow(column: str, fields: pa.Schema | pa.StructType) -> tuple[tuple[str, ...], pa.DataType | None]:
    """Return the path to a column, and its type; None as the type where there is no such column, or two."""
    if fields.names.count(column) == 1:
        return (column,), fields.field(column).type
    first, _, rest = column.partition(".")
    outer = fields.field(first).type if rest and first in fields.names else None
    if outer is None or pa.types.is_null(outer):
        return (first,), outer
    path, found = follow(rest, outer) if pa.types.is_struct(outer) else ((), None)
    return (first, *path), found


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text, bytes or null, or a dictionary of them."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
    return value in (*text, pa.null())


def read_column(batch: pa.RecordBatch, path: tuple[str, ...]) -> Iterator[TextBatch]:
    """Yield the values of the column at `path` in order, as bytes that may be invalid UTF-8. A null is empty."""
    column = batch.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    if not _is_text(column.type):  # a chunk of a CSV that looks like numbers: `datasets` casts it, too
        column = column.cast(pa.large_string())
    values = column.cast(pa.large_binary())
    values.validate(full=True)  # offsets outside of the data would crash the process
    if values.null_count:
        values = values.fill_null(b"")
    if not len(values):
        return
    _, offset_buffer, data = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[values.offset : values.offset + len(values) + 1]
    text: Any = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    begin = 0
    while begin < len(values):
        # The batch ends with the document that fills it.
        end = int(np.searchsorted(offsets, offsets[begin] + BATCH_BYTES, side="left"))
        end = min(max(end, begin + 1), len(values))
        yield TextBatch(text, offsets[begin:end], offsets[begin + 1 : end + 1])
        begin = end


def _paths(fields: pa.Schema | pa.StructType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the names and types of columns, those within structs as `a.b`."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from ((f"{field.name}.{inner}", kind) for inner, kind in _paths(field.type))
        else:
            yield field.name, field.type


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with (
        open_seekable_file(uri) as file,
        # With a buffer size, compressed pages are read one by one instead of a whole row group at once.
        pq.ParquetFile(file, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as parquet,
    ):
        yield parquet


@contextmanager
def _open_arrow(uri: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with open_seekable_file(uri) as file:
        start = file.read(len(_FILE_FORMAT))
        if start == _FILE_FORMAT:
            yield pa.ipc.open_file(file)
            return
        if start.startswith(_CONTINUATION):  # a stream of Arrow 0.15 or later, which has a mark at its end
            _require_end_of_stream(file, uri)
        file.seek(0)
        yield pa.ipc.open_stream(file)


def _require_end_of_stream(file: BinaryIO, uri: str) -> None:
    """Raise `ArtifactError` for the stream of a killed writer. Arrow reads it without an error."""
    file.seek(-len(_END_OF_STREAM), os.SEEK_END)
    if file.read() != _END_OF_STREAM:
        raise ArtifactError(f"{uri}: the Arrow stream has no end: it is cut off, or still being written.")
