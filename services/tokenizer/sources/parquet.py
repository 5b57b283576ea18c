"""Parquet: a row is a document, read from one column; files are cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import ArtifactError, RecipeError
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.sources.piece import InputFile, Piece

_ROWS_IN_MEMORY = 1_024


def cut(file: InputFile, split_bytes: int) -> list[Piece]:
    """One piece per row group. Raises `RecipeError` when the column is absent or holds no text."""
    with _open_parquet(file.uri) as parquet:
        _check_column(file, parquet.schema_arrow)
        metadata = parquet.metadata
        leaf = next(
            index
            for index in range(metadata.num_columns)
            if metadata.schema.column(index).path.split(".")[0] == file.column
        )
        sizes = [
            metadata.row_group(index).column(leaf).total_uncompressed_size for index in range(metadata.num_row_groups)
        ]
    return [Piece(file, index, index + 1, size) for index, size in enumerate(sizes)]


def read(piece: Piece) -> Iterator[bytes]:
    """Documents as the column's bytes; a null is an empty document."""
    with _open_parquet(piece.file.uri) as parquet:
        batches = parquet.iter_batches(
            batch_size=_ROWS_IN_MEMORY,
            row_groups=list(range(piece.begin, piece.end)),
            columns=[piece.file.column],
            use_threads=False,
        )
        for batch in batches:
            for document in batch.column(0).cast(pa.large_binary()).to_pylist():
                yield document or b""


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with open_file(uri) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                yield parquet
        except pa.ArrowInvalid as error:
            raise ArtifactError(f"{uri}: not a readable parquet file: {error}") from error


def _check_column(file: InputFile, schema: pa.Schema) -> None:
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
