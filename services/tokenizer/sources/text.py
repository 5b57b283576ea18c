"""Plain text: a file is a document, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.sources.file_range import FileRange, InputFile, whole
from services.tokenizer.sources.file_system import open_file
from services.tokenizer.text_batch import TextBatch


def cut(file: InputFile, split_bytes: int) -> list[FileRange]:
    return [whole(file)]


def read(file_range: FileRange) -> Iterator[TextBatch]:
    with open_file(file_range.file.uri) as file:
        yield TextBatch.of([file.read()])


def locate(file_range: FileRange, number: int) -> str:
    return f"{file_range.file.uri}: document {number + 1:,}"
