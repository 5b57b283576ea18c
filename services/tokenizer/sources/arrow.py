"""Reads Arrow IPC files and streams, where a row is a document. `datasets` saves streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from services.common.errors import ArtifactError
from services.tokenizer.sources.arrow_messages import CONTINUATION, FILE_FORMAT, read_blocks, read_message
from services.tokenizer.sources.column import check_column, explaining_damage, in_batches, row_of_file
from services.tokenizer.sources.document_limit import require_at_most_at_once
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_seekable_file
from services.tokenizer.sources.file_version import require_unchanged
from services.tokenizer.text_batch import TextBatch

_END_OF_STREAM = CONTINUATION + bytes(4)
_WITHOUT_LIMIT = 2**60


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return a file range for each record batch of a file, or the whole stream, which can only be read from its begin.

    Raises `RecipeError` for a column that is missing or holds no text, and `ArtifactError` for a file that has changed:
    the record batches are kept for repeated commands, which may find the listed version again.
    """
    with require_unchanged(file), _open_arrow(file.uri, max_document_bytes) as batches:
        check_column(file, batches.schema)
        if not batches.is_file_format:
            return [whole(file)]
        count = batches.count
    return [FileRange(file, index, index + 1, file.bytes // count) for index in range(count)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Read the column's values as documents. A null is an empty document.

    Raises `ArtifactError` for a record batch above `bytes_at_once(max_document_bytes)`.
    """
    with _open_arrow(file_range.file.uri, max_document_bytes) as batches:
        for batch in batches.read(file_range):
            yield from in_batches(batch.column(file_range.file.column))


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the row, from 1."""
    rows = 0
    if file_range.begin:
        # These record batches were read before, within the limit.
        with _open_arrow(file_range.file.uri, _WITHOUT_LIMIT) as batches:
            before = FileRange(file_range.file, 0, file_range.begin, 0)
            rows = sum(batch.num_rows for batch in batches.read(before))
    return row_of_file(file_range, rows + number)


class _Batches:
    """Reads the record batches of a file or a stream, after a check of the size that each message declares."""

    def __init__(self, file: BinaryIO, uri: str, max_document_bytes: int, *, is_file_format: bool) -> None:
        self._file, self._uri, self._max_document_bytes = file, uri, max_document_bytes
        self.is_file_format = is_file_format
        self._begins: list[int] = []
        if is_file_format:
            dictionaries, self._begins = read_blocks(file)
            for begin in dictionaries:
                self._check(begin)
            file.seek(0)
            self._reader = pa.ipc.open_file(file)
        else:
            if _begins_with_continuation(file):
                _require_end(file, uri)
            self._check(0)
            file.seek(0)
            self._reader = pa.ipc.open_stream(file)

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    @property
    def count(self) -> int:
        """Number of record batches of a file. It is 0 for a stream."""
        return len(self._begins)

    def read(self, file_range: FileRange) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of a file range, or all of a stream."""
        if self.is_file_format:
            for index in range(file_range.begin, file_range.end):
                self._check(self._begins[index])
                yield self._reader.get_batch(index)
            return
        while True:
            begin = position = self._file.tell()
            while (end := self._check(position)) is not None:  # the messages before a record batch hold dictionaries
                position = end
            self._file.seek(begin)
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            yield batch

    def _check(self, begin: int) -> int | None:
        """Check the size of the message at a position, and return the message's end.

        Returns None for a record batch, and at the end of a stream. Raises `ArtifactError` for a message above the
        limit.
        """
        message = read_message(self._file, begin)
        if message is None:
            return None
        place = f"{self._uri}: at byte {begin:,}"
        most = max(message.decoded_bytes, message.metadata_bytes, message.end - begin)
        require_at_most_at_once(place, "a record batch", most, self._max_document_bytes)
        return None if message.is_record_batch else message.end


@contextmanager
def _open_arrow(uri: str, max_document_bytes: int) -> Iterator[_Batches]:
    with open_seekable_file(uri) as file, explaining_damage(uri, "Arrow"):
        is_file_format = file.read(len(FILE_FORMAT)) == FILE_FORMAT
        yield _Batches(file, uri, max_document_bytes, is_file_format=is_file_format)


def _begins_with_continuation(file: BinaryIO) -> bool:
    """Return whether the stream is of Arrow 0.15 or later, whose streams have a mark at their end."""
    file.seek(0)
    return file.read(len(CONTINUATION)) == CONTINUATION


def _require_end(file: BinaryIO, uri: str) -> None:
    """Raise `ArtifactError` for a stream without the mark of its end. Arrow reads such a stream without an error."""
    file.seek(-len(_END_OF_STREAM), os.SEEK_END)
    if file.read() != _END_OF_STREAM:
        raise ArtifactError(f"{uri}: the Arrow stream has no end: it is cut off, or still being written.")
