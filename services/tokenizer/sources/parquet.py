"""Reads Parquet, where a row is a document. Files are cut by row groups."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import BinaryIO

import pyarrow.parquet as pq

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, explaining_damage, in_batches, row_of_file
from services.tokenizer.sources.document_limit import bytes_at_once, require_at_most_at_once, too_large
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.sources.file_system import is_local, open_seekable_file
from services.tokenizer.sources.file_version import require_unchanged
from services.tokenizer.sources.parquet_pages import read_pages
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

_LARGE_ROW_BYTES = 2**18
_BUFFER_BYTES = 2**20
# Bytes that a value has beside its text, such as its length, and bytes that a page has beside its values.
_VALUE_BYTES, _PAGE_BYTES = 16, 4_096


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return a file range for each row group.

    Raises `RecipeError` when the column is missing or holds no text, and `ArtifactError` for a file that has changed:
    the row groups are kept for repeated commands, which may find the listed version again.
    """
    with require_unchanged(file), _open_parquet(file.uri) as (parquet, _):
        check_column(file, parquet.schema_arrow)
        groups = range(parquet.metadata.num_row_groups)
        sizes = [chunk.total_uncompressed_size for chunk in _column_chunks(parquet.metadata, file, groups)]
    return [FileRange(file, index, index + 1, size) for index, size in enumerate(sizes)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Read the column's values as documents. A null is an empty document.

    Raises `ArtifactError` for a page above `bytes_at_once(max_document_bytes)`.
    """
    with _open_parquet(file_range.file.uri) as (parquet, file):
        groups = range(file_range.begin, file_range.end)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        shared_bytes = _check_pages(file_range, parquet.metadata, file, max_document_bytes)
        batches = parquet.iter_batches(
            batch_size=min(
                _rows_at_a_time(rows, file_range.bytes),
                # A row is at most as long as the text that it may share with others.
                max(1, bytes_at_once(max_document_bytes) // max(1, shared_bytes)),
            ),
            row_groups=list(groups),
            columns=[file_range.file.column],
            use_threads=False,
        )
        for batch in batches:
            yield from in_batches(batch.column(file_range.file.column))


def _rows_at_a_time(rows: int, total_bytes: int) -> int:
    """Return the number of rows of about BATCH_BYTES. It is 1 for large rows, because some may be much larger."""
    mean_bytes = total_bytes / max(rows, 1)
    return 1 if mean_bytes > _LARGE_ROW_BYTES else max(1, int(BATCH_BYTES / max(mean_bytes, 1)))


def _check_pages(file_range: FileRange, metadata: pq.FileMetaData, file: BinaryIO, max_document_bytes: int) -> int:
    """Check the sizes of pages, and return the bytes of the largest page whose values may share text.

    In a remote file only the first page of a column chunk is checked, unless the footer says that the chunk is large:
    every page header would be a request of its own. Raises `ArtifactError` for a page above a limit.
    """
    source, shared_bytes = file_range.file, 0
    groups = range(file_range.begin, file_range.end)
    for group, chunk in zip(groups, _column_chunks(metadata, source, groups), strict=True):
        begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
        reads_all = is_local(source.uri) or chunk.total_uncompressed_size > bytes_at_once(max_document_bytes)
        pages = read_pages(file, begin, chunk.total_compressed_size, chunk.num_values)
        for page in pages if reads_all else islice(pages, 1):
            place = f"{source.uri}: row group {group + 1:,}, column {source.column!r}, at byte {page.begin:,}"
            require_at_most_at_once(place, "a page", max(page.decoded_bytes, page.compressed_bytes), max_document_bytes)
            if page.decoded_bytes > page.num_values * (max_document_bytes + _VALUE_BYTES) + _PAGE_BYTES:
                what = f"a page of {page.num_values:,} documents"
                raise too_large(place, what, page.decoded_bytes, max_document_bytes)
            shared_bytes = max(shared_bytes, page.decoded_bytes if page.repeats_text else 0)
    return shared_bytes


def _column_chunks(
    metadata: pq.FileMetaData, file: InputFile, groups: Iterable[int]
) -> Iterator[pq.ColumnChunkMetaData]:
    """Yield what the file's footer says of its column in each of some row groups.

    Raises `ArtifactError` or `OSError` for a footer that contradicts itself. The accessor of pyarrow 26 ends
    the process with SIGABRT for such a footer, because a C++ exception leaves it; the reader of data, which is asked
    first, raises.
    """
    leaf = _leaf(metadata, file)
    with pq.ParquetFile(_FileWithoutData(), metadata=metadata, buffer_size=_BUFFER_BYTES) as reader:
        for group in groups:
            with suppress(_DataRead):
                next(reader.iter_batches(row_groups=[group], columns=[file.column], use_threads=False), None)
            yield metadata.row_group(group).column(leaf)


class _FileWithoutData(io.RawIOBase):
    """A file of unlimited size of which nothing can be read: a reader gets as far as the footer that it has."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return 2**62 if whence == io.SEEK_END else offset

    def tell(self) -> int:
        return 2**62

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        raise _DataRead


class _DataRead(Exception):
    """Raised where a reader has passed the footer's checks and begins to read data."""


def _leaf(metadata: pq.FileMetaData, file: InputFile) -> int:
    """Return the index of the file's column in the Parquet schema. Raises `ArtifactError` when it is missing there."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if file.column not in paths:
        raise ArtifactError(
            f"{file.uri}: the file is damaged: its Arrow schema has the column {file.column!r}, its Parquet schema not."
        )
    return paths.index(file.column)


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    with _open_parquet(file_range.file.uri) as (parquet, _):
        return row_of_file(
            file_range, sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.begin)) + number
        )


@contextmanager
def _open_parquet(uri: str) -> Iterator[tuple[pq.ParquetFile, BinaryIO]]:
    with (
        open_seekable_file(uri) as file,
        explaining_damage(uri, "parquet"),
        # With a buffer size, compressed pages are read one by one instead of a whole row group at once.
        pq.ParquetFile(file, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as parquet,
    ):
        yield parquet, file
