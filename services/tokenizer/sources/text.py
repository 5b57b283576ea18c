"""Plain text: a file is a document, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.sources.file_system import open_file
from services.tokenizer.sources.piece import InputFile, Piece, whole
from services.tokenizer.text_batch import TextBatch


def cut(file: InputFile, split_bytes: int) -> list[Piece]:
    return [whole(file)]


def read(piece: Piece) -> Iterator[TextBatch]:
    with open_file(piece.file.uri) as file:
        yield TextBatch.of([file.read()])


def locate(piece: Piece, number: int) -> str:
    return f"{piece.file.uri}: document {number + 1:,}"
