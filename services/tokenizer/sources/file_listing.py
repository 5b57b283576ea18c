"""A list of input files in columns: a million files take about 200 MB, where as many Python objects take 1 GB."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.tokenizer.arrow_arrays import array_of_numbers, array_of_text, numbers_of
from services.tokenizer.sources.file_range import InputFile

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


class FileListing(Sequence[InputFile]):
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
        return sum(block.num_rows for block in self.blocks[-1:]) + BLOCK_FILES * max(0, len(self.blocks) - 1)

    @overload
    def __getitem__(self, index: int) -> InputFile: ...

    @overload
    def __getitem__(self, index: slice) -> list[InputFile]: ...

    def __getitem__(self, index: int | slice) -> InputFile | list[InputFile]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = range(len(self))[index]
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


def read_files(block: pa.RecordBatch) -> Iterator[InputFile]:
    """Yield the files of a block."""
    columns = [block.column(field.name).to_pylist() for field in SCHEMA]
    uris, names = ([path.decode("utf-8", "surrogateescape") for path in column] for column in columns[:2])
    return (InputFile(*values) for values in zip(uris, names, *columns[2:], strict=True))
