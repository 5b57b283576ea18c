"""Parquet: a row is a document, read from one column; files are cut by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import BinaryIO

import pyarrow.parquet as pq

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, explaining_damage, in_batches, row_of_file
from services.tokenizer.sources.document_limit import bytes_at_once, require_at_most_at_once, too_large
from services.tokenizer.sources.file_range import FileRange, InputFile
from services.tokenizer.sources.file_system import is_local, open_seekable_file
from services.tokenizer.sources.parquet_pages import read_pages
from services.tokenizer.text_batch import BATCH_BYTES, TextBatch

_LARGE_ROW_BYTES = 2**18
_BUFFER_BYTES = 2**20
# What a value has beside its text, such as its length, and a page beside its values.
_VALUE_BYTES, _PAGE_BYTES = 16, 4_096


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """One file range per row group. Raises `RecipeError` when the column is absent or holds no text."""
    with _open_parquet(file.uri) as (parquet, _):
        check_column(file, parquet.schema_arrow)
        metadata = parquet.metadata
        leaf = _leaf(metadata, file)
        sizes = [
            metadata.row_group(index).column(leaf).total_uncompressed_size for index in range(metadata.num_row_groups)
        ]
    return [FileRange(file, index, index + 1, size) for index, size in enumerate(sizes)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document.

    Raises `ArtifactError` for a page that would take more than some `max_document_bytes` to decode.
    """
    with _open_parquet(file_range.file.uri) as (parquet, file):
        groups = range(file_range.begin, file_range.end)
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        shared_bytes = _check_pages(file_range, parquet.metadata, file, max_document_bytes)
        batches = parquet.iter_batches(
            batch_size=min(
                _rows_at_a_time(rows, file_range.bytes),
                # No row is longer than the text that it shares with others.
                max(1, bytes_at_once(max_document_bytes) // max(1, shared_bytes)),
            ),
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


def _check_pages(file_range: FileRange, metadata: pq.FileMetaData, file: BinaryIO, max_document_bytes: int) -> int:
    """Bytes of the largest page from which values may share text. Raises `ArtifactError` for a page that is too large.

    Of a file elsewhere the headers of all pages are read only where the footer says that they are large: they lie apart
    in what is downloaded anyway, and would be asked for one by one.
    """
    source = file_range.file
    leaf = _leaf(metadata, source)
    shared_bytes = 0
    for group in range(file_range.begin, file_range.end):
        chunk = metadata.row_group(group).column(leaf)
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


def _leaf(metadata: pq.FileMetaData, file: InputFile) -> int:
    """The number of the column among those that hold values. Raises `ArtifactError` where Arrow's schema lies."""
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if file.column not in paths:
        raise ArtifactError(
            f"{file.uri}: damaged: its Arrow schema has a column {file.column!r} of text, and its parquet schema none."
        )
    return paths.index(file.column)


def locate(file_range: FileRange, number: int) -> str:
    """The row of a document, from 1 on."""
    with _open_parquet(file_range.file.uri) as (parquet, _):
        return row_of_file(
            file_range, sum(parquet.metadata.row_group(group).num_rows for group in range(file_range.begin)) + number
        )


@contextmanager
def _open_parquet(uri: str) -> Iterator[tuple[pq.ParquetFile, BinaryIO]]:
    with (
        open_seekable_file(uri) as file,
        explaining_damage(uri, "parquet"),
        # Buffered: what is compressed is read piece by piece, and not a row group at a time.
        pq.ParquetFile(file, page_checksum_verification=True, buffer_size=_BUFFER_BYTES) as parquet,
    ):
        yield parquet, file
