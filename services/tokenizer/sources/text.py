"""Reads plain text, where a file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import partial

from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.document_limit import explain_too_long, read_document
from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.text_stream import open_text
from services.tokenizer.text_batch import TextBatch


def cut(file: InputFile, split_bytes: int, max_document_bytes: int) -> list[FileRange]:
    """Return the whole file."""
    return [whole(file)]


def read(file_range: FileRange, max_document_bytes: int, bad_rows: BadRows) -> Iterator[TextBatch]:
    """Read the file as one document. A file of more than `max_document_bytes` is a bad row."""
    uri = file_range.file.uri
    with open_text(uri) as file:
        document = read_document(file, max_document_bytes)
    if document is None:
        what = f"{uri}: a file, which is a document,"
        bad_rows.add("too long", uri, partial(explain_too_long, what, None, max_document_bytes))
    else:
        yield TextBatch.of([document.removeprefix(codecs.BOM_UTF8)])


def locate(file_range: FileRange, number: int) -> str:
    """Return a document's place for an error: the file and the number of the document, from 1."""
    return f"{file_range.file.uri}: document {number + 1:,}"
