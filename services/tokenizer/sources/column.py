"""A column of text in Arrow's memory, as batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from services.common.errors import RecipeError
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

# A column of bytes with the same memory as a column of text: its values are as they are in the file, valid or not.
_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
    **{each: each for each in (pa.binary(), pa.large_binary(), pa.binary_view())},
}


def check_column(file: InputFile, schema: pa.Schema) -> None:
    """Raises `RecipeError` when the file's column is absent, there twice, or holds no text."""
    if file.column not in schema.names:
        raise RecipeError(
            f"{file.uri}: no column {file.column!r}; its columns are {', '.join(schema.names) or 'none'}. "
            f"Set `column` of this source to the one that holds the text."
        )
    if schema.names.count(file.column) > 1:
        raise RecipeError(f"{file.uri}: has {schema.names.count(file.column)} columns {file.column!r}, expected one.")
    found = schema.field(file.column).type
    if (found.value_type if pa.types.is_dictionary(found) else found) not in _BYTES_OF:
        raise RecipeError(f"{file.uri}: column {file.column!r} is {found}, expected text.")


def in_batches(column: pa.Array) -> Iterator[TextBatch]:
    """The values in order, without a copy of the text; a null is an empty document.

    Raises `pa.ArrowInvalid` for a column that points outside of its own data.
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
        # Up to the first document that makes the batch full.
        end = int(np.searchsorted(offsets, offsets[begin] + BATCH_BYTES, side="left"))
        end = min(max(end, begin + 1), len(values))
        yield TextBatch(text, offsets[begin:end], offsets[begin + 1 : end + 1])
        begin = end


def row_of_file(file_range: FileRange, row: int) -> str:
    return f"{file_range.file.uri}: row {row + 1:,}, column {file_range.file.column!r}"


def _checked(column: pa.Array) -> pa.Array:
    """The column as bytes. Of a damaged file Arrow would follow offsets and indices into memory that is not its own."""
    if pa.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(column.indices, _checked(column.dictionary))
    column.validate()
    held = column.view(_BYTES_OF[column.type])
    held.validate(full=True)
    return held
