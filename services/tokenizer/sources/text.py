"""Plain text: a file is a document, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.sources.document_limit import read_document, too_large
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import is_compressed, open_file
from services.tokenizer.text_batch import TextBatch

_WHAT = "a file, which is a document,"


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """The file. Raises `ArtifactError` where its size says that it is too large."""
    if not is_compressed(file.uri) and file.bytes > max_document_bytes:
        raise too_large(file.uri, _WHAT, file.bytes, max_document_bytes)
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """The file. Raises `ArtifactError` once more than `max_document_bytes` of it were read."""
    with open_file(file_range.file.uri) as file:
        yield TextBatch.of([read_document(file, file_range.file.uri, _WHAT, max_document_bytes)])


def locate(file_range: FileRange, number: int) -> str:
    """Which document of the file, from 1 on."""
    return f"{file_range.file.uri}: document {number + 1:,}"
