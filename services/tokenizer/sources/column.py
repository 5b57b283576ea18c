"""Turns a column of text in Arrow's memory into batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
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
    **{kind: kind for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
}

_SHARED_AT_MOST = 8
"""Factor by which the text of a dictionary of views may be larger than its memory. It is decoded as a whole."""


def check_column(file: InputFile, schema: pa.Schema) -> None:
    """Raise `RecipeError` when the file's column is missing, exists twice, or holds no text."""
    if file.column not in schema.names:
        raise RecipeError(
            f"{file.uri}: the file has no column {file.column!r}; its columns are {', '.join(schema.names) or 'none'}. "
            f"Set `column` of this source to the column that holds the text."
        )
    if schema.names.count(file.column) > 1:
        raise RecipeError(
            f"{file.uri}: the file has {schema.names.count(file.column)} columns {file.column!r}, expected one."
        )
    found = schema.field(file.column).type
    if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
        raise RecipeError(f"{file.uri}: column {file.column!r} is {found}, expected text.")


def in_batches(column: pa.Array) -> Iterator[TextBatch]:
    """Yield the values in order, without a copy of the text. A null is an empty document.

    Raises `pa.ArrowInvalid` for a column whose offsets point outside of its data.
    """
    for values in _without_shared_text(_checked(column)):
        yield from _in_batches(values.cast(pa.large_binary()))


def _without_shared_text(values: pa.Array) -> Iterator[pa.Array]:
    """Yield slices of about BATCH_BYTES of text, or of one document, for a column whose values may share their text.

    A dictionary, or views, can name one text of 100 MB a million times, in a few megabytes of memory.
    """
    is_dictionary = pa.types.is_dictionary(values.type)
    if is_dictionary:
        sizes_of_dictionary = _sizes_of(values.dictionary)
        if sizes_of_dictionary.sum() > _SHARED_AT_MOST * (values.dictionary.nbytes + BATCH_BYTES):
            raise pa.ArrowInvalid("the values of the column's dictionary share their text")
        dictionary = values.dictionary.cast(pa.large_binary())
        sizes = pa.array(sizes_of_dictionary).take(values.indices).fill_null(0).to_numpy(zero_copy_only=False)
    elif pa.types.is_binary_view(values.type):
        sizes = _sizes_of(values)
    else:
        yield values
        return
    ends = np.cumsum(sizes)
    begin = begin_bytes = 0
    while begin < len(values):
        end = max(begin + 1, int(np.searchsorted(ends, begin_bytes + BATCH_BYTES, side="right")))
        piece = values.slice(begin, end - begin)
        yield dictionary.take(piece.indices) if is_dictionary else piece
        begin, begin_bytes = end, int(ends[end - 1])


def _sizes_of(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the size of every value in bytes, 0 for a null. The first 4 of a view's 16 bytes are the size."""
    if not pa.types.is_binary_view(values.type):
        lengths = pc.binary_length(values).cast(pa.int64()).fill_null(0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False))
    views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)[values.offset :][: len(values)]
    return np.where(values.is_valid().to_numpy(zero_copy_only=False), views[:, 0].astype(np.int64), 0)


def _in_batches(values: pa.Array) -> Iterator[TextBatch]:
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
    except UnicodeDecodeError as error:
        shown = error.object[:60]
        raise ArtifactError(
            f"{uri}: not a readable {file_format} file: its schema has the name {shown!r}, which is not UTF-8: byte "
            f"0x{error.object[error.start]:02x} at {error.start:,}. Write the file again with names in UTF-8."
        ) from error
    except pa.ArrowException as error:
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
