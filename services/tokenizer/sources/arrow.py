"""Arrow IPC, the file format and the stream that `datasets` saves: a row is a document, read from one column."""

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
from services.tokenizer.text_batch import TextBatch

_END_OF_STREAM = CONTINUATION + bytes(4)
_WITHOUT_LIMIT = 2**60


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """One file range a record batch; a stream cannot be entered half-way. Raises `RecipeError` for an unfit column."""
    with _open_arrow(file.uri, max_document_bytes) as batches:
        check_column(file, batches.schema)
        if not batches.is_file_format:
            return [whole(file)]
        count = batches.count
    return [FileRange(file, index, index + 1, file.bytes // count) for index in range(count)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document.

    Raises `ArtifactError` for a record batch that would take more than some `max_document_bytes` to decode.
    """
    with _open_arrow(file_range.file.uri, max_document_bytes) as batches:
        for batch in batches.read(file_range):
            yield from in_batches(batch.column(file_range.file.column))


def locate(file_range: FileRange, number: int) -> str:
    """The row of a document, from 1 on."""
    rows = 0
    if file_range.begin:
        # Only batches that were read before, within the limit of then.
        with _open_arrow(file_range.file.uri, _WITHOUT_LIMIT) as batches:
            before = FileRange(file_range.file, 0, file_range.begin, 0)
            rows = sum(batch.num_rows for batch in batches.read(before))
    return row_of_file(file_range, rows + number)


class _Batches:
    """The record batches of a file, each of which is looked at before it is read."""

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
        """Record batches of a file of the file format."""
        return len(self._begins)

    def read(self, file_range: FileRange) -> Iterator[pa.RecordBatch]:
        if self.is_file_format:
            for index in range(file_range.begin, file_range.end):
                self._check(self._begins[index])
                yield self._reader.get_batch(index)
            return
        while True:
            begin = position = self._file.tell()
            while (end := self._check(position)) is not None:  # dictionaries, up to the next record batch
                position = end
            self._file.seek(begin)
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            yield batch

    def _check(self, begin: int) -> int | None:
        """The end of a message that comes before a record batch, None for a record batch, and where a stream ends.

        Raises `ArtifactError` for a message that is too large to be read as a whole.
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
    """Is it a stream as Arrow writes them since 0.15, with an end?"""
    file.seek(0)
    return file.read(len(CONTINUATION)) == CONTINUATION


def _require_end(file: BinaryIO, uri: str) -> None:
    """Arrow takes a stream that was cut off between two batches for a whole one; every writer marks the end."""
    file.seek(-len(_END_OF_STREAM), os.SEEK_END)
    if file.read() != _END_OF_STREAM:
        raise ArtifactError(f"{uri}: an Arrow stream without its end: it is cut off, or still being written.")
