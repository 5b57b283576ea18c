"""Input files, the file ranges that encode tasks read, and the listing of a source.

A listing keeps its files in columns: a million of them take about 200 MB, where as many Python objects take 1 GB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.tokenizer.arrow_arrays import array_of_numbers, array_of_text, numbers_of

Format = Literal["text", "jsonl", "parquet", "arrow", "rows", "wikicorpus", "python_module", "python_topics"]

BLOCK_FILES = 256
"""Files in a block of a listing. A task that reads footers takes one block."""
SCHEMA = pa.schema(
    [
        pa.field("uri", pa.binary(), nullable=False),  # a local path need not be UTF-8
        pa.field("name", pa.binary(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("version", pa.string(), nullable=False),
        pa.field("builder", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class InputFile:
    """A file of a source, as it was when the corpus was planned."""

    uri: str
    name: str
    """Path relative to the source's folder."""
    format: Format
    column: str
    bytes: int
    version: str
    """What is known without reading: size and modification time, and the ETag of a remote file."""
    builder: str = ""
    """For the format "rows", the builder of `datasets` that reads the file: see `dataset_rows`."""


@dataclass(frozen=True)
class FileRange:
    """The documents of a file that begin in [begin, end): row groups of Parquet, batches of Arrow, or bytes."""

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
    """Number of earlier passes over the source. It is 0 unless the source's weight is above 1."""
    first_pass_index: int
    """Index of the partition of the first pass that has the same file ranges."""
    file_ranges: tuple[FileRange, ...]


class FileListing:
    """The files of a source in the order of the corpus. An `InputFile` is made when a caller asks for one."""

    def __init__(self, blocks: Sequence[pa.RecordBatch]) -> None:
        """Take record batches of SCHEMA, of which all but the last have BLOCK_FILES rows."""
        self.blocks = tuple(blocks)

    @classmethod
    def of(cls, files: Iterable[InputFile]) -> FileListing:
        """Make a listing of files that are taken one after another, at most a block of them at a time."""
        remaining = iter(files)
        blocks = []
        while block := list(islice(remaining, BLOCK_FILES)):
            sizes = np.fromiter((file.bytes for file in block), np.int64, len(block))
            arrays = [
                array_of_numbers(sizes)
                if field.name == "bytes"
                else array_of_text([getattr(file, field.name) for file in block], field.type)
                for field in SCHEMA
            ]
            blocks.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        return cls(blocks)

    def __len__(self) -> int:
        return sum(block.num_rows for block in self.blocks)

    def __getitem__(self, number: int) -> InputFile:
        return next(read_files(self.blocks[number // BLOCK_FILES].slice(number % BLOCK_FILES, 1)))

    def __iter__(self) -> Iterator[InputFile]:
        return chain.from_iterable(map(read_files, self.blocks))

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every file."""
        columns = [numbers_of(block.column("bytes")) for block in self.blocks]
        return np.concatenate([np.empty(0, np.int64), *columns])

    @property
    def digest(self) -> str:
        """Hash of all that is known without reading, by which the corpus's id follows from its inputs."""
        # `pydoc://` makes text from names, so a renamed file is new input.
        hasher = hashlib.sha256()
        for file in self:
            hasher.update(
                f"{file.name}\0{file.format}\0{file.version}\0{file.builder}\0".encode("utf-8", "surrogateescape")
            )
        return hasher.hexdigest()


def whole_file(file: InputFile) -> FileRange:
    """Return the file range that is the whole file, in bytes."""
    return FileRange(file, begin=0, end=file.bytes, bytes=file.bytes)


def read_files(block: pa.RecordBatch) -> Iterator[InputFile]:
    """Yield the files of a block."""
    columns = [block.column(field.name).to_pylist() for field in SCHEMA]
    uris, names = ([path.decode("utf-8", "surrogateescape") for path in column] for column in columns[:2])
    return (InputFile(*values) for values in zip(uris, names, *columns[2:], strict=True))
