"""Turns a column of text in Arrow's memory into batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

# Types of bytes with the memory layout of types of text. As bytes, values may be invalid UTF-8.
_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
    **{kind: kind for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.null())},
}


def find_column(file: InputFile, schema: pa.Schema) -> tuple[str, ...]:
    """Return the names that lead to the file's column: one, or several where `a.b` is the field b of the struct a.

    A path ends where all values are null. Raises `RecipeError` when the column is missing, exists twice, or holds no
    text.
    """
    if schema.names.count(file.column) > 1:
        raise RecipeError(
            f"{file.uri}: the file has {schema.names.count(file.column)} columns {file.column!r}, expected one."
        )
    path, found = _walk(file.column, schema)
    if found is None:
        raise RecipeError(
            f"{file.uri}: the file has no column {file.column!r}; its columns are "
            f"{', '.join(_paths(schema)) or 'none'}. Set `column` of this source to the column that holds the text."
        )
    if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
        inner = [] if not pa.types.is_struct(found) else [f"{file.column}.{name}" for name in _paths(found)]
        advice = f" Set `column` of this source to one of {', '.join(inner)}." if inner else ""
        raise RecipeError(f"{file.uri}: column {file.column!r} is {found}, expected text.{advice}")
    return path


def _walk(column: str, fields: pa.Schema | pa.StructType) -> tuple[tuple[str, ...], pa.DataType | None]:
    """Return the path to a column, and its type; None as the type where there is no such column."""
    names = fields.names
    if column in names:
        return (column,), fields.field(column).type
    first, _, rest = column.partition(".")
    outer = fields.field(first).type if rest and first in names else None
    if outer is None or pa.types.is_null(outer):
        return (first,), outer
    path, found = _walk(rest, outer) if pa.types.is_struct(outer) else ((), None)
    return (first, *path), found


def _paths(fields: pa.Schema | pa.StructType) -> Iterator[str]:
    """Yield the names of columns, those within structs as `a.b`."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from (f"{field.name}.{inner}" for inner in _paths(field.type))
        else:
            yield field.name


def read_column(batch: pa.RecordBatch, path: tuple[str, ...]) -> Iterator[TextBatch]:
    """Yield the values of a column as `in_batches` does; `find_column` has found the path to it."""
    column = batch.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    yield from in_batches(column)


def in_batches(column: pa.Array) -> Iterator[TextBatch]:
    """Yield the values in order, without a copy of the text. A null is an empty document.

    Raises `pa.ArrowInvalid` for a column whose offsets point outside of its data.
    """
    values = _checked(column).cast(pa.large_binary())
    if values.null_count:
        values = values.fill_null(b"")
    if not len(values):
        return
    _, offset_buffer, data = values.buffers()
    first = values.offset
    offsets = np.frombuffer(offset_buffer, np.int64)[first : first + len(values) + 1]
    text: Any = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    begin = 0
    while begin < len(values):
        # The batch ends with the document that fills it.
        end = int(np.searchsorted(offsets, offsets[begin] + BATCH_BYTES, side="left"))
        end = min(max(end, begin + 1), len(values))
        yield TextBatch(text, offsets[begin:end], offsets[begin + 1 : end + 1])
        begin = end


@contextmanager
def explaining_damage(uri: str, file_format: str) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into an `ArtifactError` that names the file."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ArtifactError(f"{uri}: not a readable {file_format} file: {error}") from error


def row_of_file(file_range: FileRange, row: int) -> str:
    """Return a row's place for an error. `row` counts the rows of the file from 0."""
    return f"{file_range.file.uri}: row {row + 1:,}, column {file_range.file.column!r}"


def _checked(column: pa.Array) -> pa.Array:
    """Return the column as bytes, after a check of its offsets. Arrow would follow wrong ones into other memory."""
    if pa.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(column.indices, _checked(column.dictionary))
    column.validate()
    held = column.view(_BYTES_OF[column.type])
    held.validate(full=True)
    return held
