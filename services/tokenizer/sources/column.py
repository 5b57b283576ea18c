"""A column of text in Arrow's memory, as batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from services.common.errors import RecipeError
from services.tokenizer.sources.piece import InputFile
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch


def check_column(file: InputFile, schema: pa.Schema) -> None:
    """Raises `RecipeError` when the file's column is absent or holds no text."""
    if file.column not in schema.names:
        raise RecipeError(
            f"{file.uri}: no column {file.column!r}; its columns are {', '.join(schema.names) or 'none'}. "
            f"Set `column` of this source to the one that holds the text."
        )
    found = schema.field(file.column).type
    held = found.value_type if pa.types.is_dictionary(found) else found
    is_text = pa.types.is_string(held) or pa.types.is_large_string(held) or pa.types.is_string_view(held)
    if not (is_text or pa.types.is_binary(held) or pa.types.is_large_binary(held)):
        raise RecipeError(f"{file.uri}: column {file.column!r} is {found}, expected text.")


def in_batches(column: pa.Array) -> Iterator[TextBatch]:
    """The values in order, without a copy of the text; a null is an empty document."""
    values = column.cast(pa.large_binary())
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
