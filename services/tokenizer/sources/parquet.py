"""Parquet: a row is a document, read from one column; files are cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, in_batches, row_of_file
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.sources.file_system import open_seekable_file
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

_LARGE_ROW_BYTES = 2**18


def cut(file: InputFile, split_bytes: int) -> list[FileRange]:
    """One file range per row group. Raises `RecipeError` when the column is absent or holds no text."""
    with _open_parquet(file.uri) as parquet:
        check_column(file, parquet.schema_arrow)
        metadata = parquet.metadata
        leaf = next(index for index in range(metadata.num_columns) if metadata.schema.column(index).path == file.column)
        sizes = [
            metadata.row_group(index).column(leaf).total_uncompressed_size for index in range(metadata.num_row_groups)
        ]
    return [FileRange(file, index, index + 1, size) for index, size in enumerate(sizes)]


def read(file_range: FileRange) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document."""
    with _open_parquet(file_range.file.uri) as parquet:
        groups = range(file_range.begin, file_range.end)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        batches = parquet.iter_batches(
            batch_size=_rows_at_a_time(rows, file_range.bytes),
            row_groups=list(groups),
            columns=[file_range.file.column],
            use_threads=False,
        )
        for batch in batches:
            yield from in_batches(batch.column(file_range.file.column))


def _rows_at_a_time(rows: int, total_bytes: int) -> int:
    """About a batch; where rows are large on average, one, because some may be several times larger."""
    mean_bytes = total_bytes / max(rows, 1)
    return 1 if mean_bytes > _LARGE_ROW_BYTES else max(1, int(BATCH_BYTES / max(mean_bytes, 1)))


def locate(file_range: FileRange, number: int) -> str:
    """The row of a document, from 1 on."""
    with _open_parquet(file_range.file.uri) as parquet:
        return row_of_file(
            file_range, sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.begin)) + number
        )


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with open_seekable_file(uri) as file:
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                yield parquet
        except pa.ArrowException as error:
            raise ArtifactError(f"{uri}: not a readable parquet file: {error}") from error
