"""What an encode task reads: input files, and the pieces that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["text", "jsonl", "parquet", "python_module", "python_topics"]


@dataclass(frozen=True)
class InputFile:
    uri: str
    name: str
    """Relative to the source that it was listed by."""
    format: Format
    column: str
    """The jsonl key or parquet column that holds the document."""
    bytes: int
    digest: str
    """Changes when the file's content does."""


@dataclass(frozen=True)
class Piece:
    """The part of a file that holds the documents from `begin` on and before `end`.

    The unit is the format's own: row groups in parquet, bytes elsewhere.
    """

    file: InputFile
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class InputSplit:
    """The pieces that one encode task reads, in the corpus's order."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


def whole(file: InputFile) -> Piece:
    return Piece(file, begin=0, end=file.bytes, bytes=file.bytes)
