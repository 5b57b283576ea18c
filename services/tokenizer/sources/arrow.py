"""Arrow IPC, the file format and the stream that `datasets` saves: a row is a document, read from one column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from services.common.errors import ArtifactError
from services.tokenizer.sources.column import check_column, in_batches
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.sources.piece import InputFile, Piece, whole
from services.tokenizer.text_batch import TextBatch

_FILE_FORMAT = b"ARROW1"


def cut(file: InputFile, split_bytes: int) -> list[Piece]:
    """One piece per record batch; a stream cannot be entered half-way. Raises `RecipeError` for an unfit column."""
    with _open_arrow(file.uri) as reader:
        check_column(file, reader.schema)
        if not isinstance(reader, pa.RecordBatchFileReader):
            return [whole(file)]
        count = reader.num_record_batches
    return [Piece(file, index, index + 1, file.bytes // count) for index in range(count)]


def read(piece: Piece) -> Iterator[TextBatch]:
    """Documents as the column's bytes; a null is an empty document."""
    with _open_arrow(piece.file.uri) as reader:
        if isinstance(reader, pa.RecordBatchFileReader):
            batches = (reader.get_batch(index) for index in range(piece.begin, piece.end))
        else:
            batches = iter(reader)
        for batch in batches:
            yield from in_batches(batch.column(piece.file.column))


@contextmanager
def _open_arrow(uri: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    with open_file(uri) as file:
        is_file_format = file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
        file.seek(0)
        try:
            with pa.ipc.open_file(file) if is_file_format else pa.ipc.open_stream(file) as reader:
                yield reader
        except pa.ArrowInvalid as error:
            raise ArtifactError(f"{uri}: not a readable Arrow file: {error}") from error
