"""What an encode task reads: input files, and the file ranges that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["text", "jsonl", "parquet", "arrow", "wikicorpus", "python_module", "python_topics"]


@dataclass(frozen=True)
class InputFile:
    uri: str
    name: str
    """Relative to the source that it was listed by."""
    format: Format
    column: str
    """The jsonl key, or the parquet or arrow column, that holds the document."""
    bytes: int
    digest: str
    """Changes when the file's content does."""
    stamp: str
    """Changes when the file is written, and costs no reading."""


@dataclass(frozen=True)
class FileRange:
    """The part of a file that holds the documents from `begin` on and before `end`.

    The unit is the format's own: row groups in parquet, record batches in arrow, bytes elsewhere.
    """

    file: InputFile
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class InputPartition:
    """The file ranges of one source that one encode task reads, in the corpus's order."""

    index: int
    source: int
    """Its number in the recipe."""
    pass_number: int
    """0, or how often the source's weight has had these file ranges read before."""
    file_ranges: tuple[FileRange, ...]

    @property
    def bytes(self) -> int:
        return sum(file_range.bytes for file_range in self.file_ranges)


def whole(file: InputFile) -> FileRange:
    return FileRange(file, begin=0, end=file.bytes, bytes=file.bytes)
