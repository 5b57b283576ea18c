"""Input files, and the file ranges that encode tasks read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["text", "jsonl", "parquet", "arrow", "rows", "wikicorpus", "python_module", "python_topics"]


@dataclass(frozen=True)
class InputFile:
    """A file of a source, as it was when the corpus was planned."""

    uri: str
    name: str
    """Path relative to the source's folder."""
    format: Format
    column: str
    """The JSON key, or the Parquet or Arrow column, that holds the document."""
    bytes: int
    version: str
    """Size and modification time of a local file, and also the ETag of a remote one: what is known without reading."""
    builder: str = ""
    """For the format "rows", the builder of `datasets` that reads the file, as `dataset_rows` describes it."""


@dataclass(frozen=True)
class FileRange:
    """A part of a file: the documents that begin in [begin, end).

    `begin` and `end` count row groups in Parquet, record batches in Arrow, and bytes in other formats.
    """

    file: InputFile
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class InputPartition:
    """The file ranges of a source that one encode task reads, in the order of the corpus."""

    index: int
    source: int
    """Index of the source in `corpus.sources`."""
    pass_number: int
    """Number of earlier partitions with the same file ranges. It is 0 unless the source's weight is above 1."""
    first_pass_index: int
    """Index of the partition of the first pass that has the same file ranges, and so the same documents."""
    file_ranges: tuple[FileRange, ...]

    @property
    def bytes(self) -> int:
        return sum(file_range.bytes for file_range in self.file_ranges)


def whole(file: InputFile) -> FileRange:
    """Return the file range that is the whole file, in bytes."""
    return FileRange(file, begin=0, end=file.bytes, bytes=file.bytes)
