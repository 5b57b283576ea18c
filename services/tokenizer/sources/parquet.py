"""Parquet: a row is a document, read from one column; files are cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, in_batches
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.sources.piece import InputFile, Piece
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch


def cut(file: InputFile, split_bytes: int) -> list[Piece]:
    """One piece per row group. Raises `RecipeError` when the column is absent or holds no text."""
    with _open_parquet(file.uri) as parquet:
        check_column(file, parquet.schema_arrow)
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


def read(piece: Piece) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document."""
    with _open_parquet(piece.file.uri) as parquet:
        groups = range(piece.begin, piece.end)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        batches = parquet.iter_batches(
            batch_size=max(1, rows * BATCH_BYTES // max(piece.bytes, 1)),
            row_groups=list(groups),
            columns=[piece.file.column],
            use_threads=False,
        )
        for batch in batches:
            yield from in_batches(batch.column(0))


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with open_file(uri) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                yield parquet
        except pa.ArrowInvalid as error:
            raise ArtifactError(f"{uri}: not a readable parquet file: {error}") from error
