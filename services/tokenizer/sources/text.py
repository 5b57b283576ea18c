"""Reads plain text, where a file is one document."""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.sources.document_limit import read_document, too_large
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import is_compressed, open_file
from services.tokenizer.text_batch import TextBatch

_WHAT = "a file, which is a document,"


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return the whole file. Raises `ArtifactError` for an uncompressed file above `max_document_bytes`."""
    if not is_compressed(file.uri) and file.bytes > max_document_bytes:
        raise too_large(file.uri, _WHAT, file.bytes, max_document_bytes)
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Read the file as one document. Raises `ArtifactError` after more than `max_document_bytes`."""
    with open_file(file_range.file.uri) as file:
        yield TextBatch.of([read_document(file, file_range.file.uri, _WHAT, max_document_bytes)])


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the number of the document, from 1."""
    return f"{file_range.file.uri}: document {number + 1:,}"
