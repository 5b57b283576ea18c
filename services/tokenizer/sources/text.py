"""Reads plain text, where a file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from services.tokenizer.sources.document_limit import read_document
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.text_stream import open_text
from services.tokenizer.text_batch import TextBatch


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return the whole file."""
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int) -> Iterator[TextBatch]:
    """Read the file as one document. Raises `ArtifactError` after more than `max_document_bytes`."""
    uri = file_range.file.uri
    with open_text(uri) as file:
        document = read_document(file, uri, "a file, which is a document,", max_document_bytes)
        yield TextBatch.of([document.removeprefix(codecs.BOM_UTF8)])


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the number of the document, from 1."""
    return f"{file_range.file.uri}: document {number + 1:,}"
