"""Reads Parquet, where a row is a document. Files are cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.parquet as pq

from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.column import explaining_damage, find_column, read_column, row_of_file
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.sources.file_system import open_seekable_file
from services.tokenizer.sources.file_version import require_unchanged
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

_LARGE_ROW_BYTES = 2**18
_BUFFER_BYTES = 2**20


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return a file range for each row group. A file without rows has none, whatever its columns are.

    Raises `RecipeError` when the column is missing or holds no text, and `ArtifactError` for a file that has changed:
    the row groups are kept for repeated commands, which may find the listed version again.
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


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the column's values as documents. A null is an empty document. A page is decoded as a whole."""
    groups = range(file_range.begin, file_range.end)
    with _open_parquet(file_range.file.uri) as parquet:
        path = find_column(file_range.file, parquet.schema_arrow)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        batches = parquet.iter_batches(
            batch_size=_rows_at_a_time(rows, file_range.bytes),
            row_groups=list(groups),
            columns=[".".join(path)],
            use_threads=False,
        )
        for batch in batches:
            yield from read_column(batch, path)


def _rows_at_a_time(rows: int, total_bytes: int) -> int:
    """Return the number of rows of about BATCH_BYTES. It is 1 for large rows, because some may be much larger."""
    mean_bytes = total_bytes / max(rows, 1)
    return 1 if mean_bytes > _LARGE_ROW_BYTES else max(1, int(BATCH_BYTES / max(mean_bytes, 1)))


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    with _open_parquet(file_range.file.uri) as parquet:
        return row_of_file(
            file_range, sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.begin)) + number
        )


@contextmanager
def _open_parquet(uri: str) -> Iterator[pq.ParquetFile]:
    with (
        open_seekable_file(uri) as file,
        explaining_damage(uri, "parquet"),
        # With a buffer size, compressed pages are read one by one instead of a whole row group at once.
        pq.ParquetFile(file, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as parquet,
    ):
        yield parquet
