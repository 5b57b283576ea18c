"""The plan of a corpus on disk: a few flat files that a task maps, so that no process holds all of the plan.

    files                     the input files, in blocks of BLOCK_FILES: an Arrow file
    cuts/000/000012.ranges    the file ranges of block 12, the result of one task; a repeated command uses it again
    ranges                    the file ranges of all blocks, 32 bytes each
    partitions                the partitions, 40 bytes each: a source, a pass, and a run of file ranges
    plan.json                 checksums of the files above; it is written last

A task is given the folder and a number. Its cost is that of its own part: the file ranges of its partition, and the
blocks of their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import write_durably
from services.common.input.files import parse_json, read_file
from services.tokenizer.atomic_file import write_file
from services.tokenizer.mapped_array import map_array
from services.tokenizer.scratch_tree import path_in_tree
from services.tokenizer.sources.input_files import (
    BLOCK_FILES,
    SCHEMA,
    FileListing,
    FileRange,
    InputFile,
    InputPartition,
    read_files,
)

PLAN = "plan.json"
RANGE = np.dtype([("file", "<i8"), ("begin", "<i8"), ("end", "<i8"), ("bytes", "<i8")])
"""A file range. `file` is BLOCK_FILES times the number of the file's block, plus the file's row in the block."""
PARTITION = np.dtype(
    [
        ("source", "<i4"),
        ("pass_number", "<i4"),
        ("first_pass_index", "<i8"),
        ("first", "<i8"),
        ("end", "<i8"),
        ("bytes", "<i8"),
    ]
)
"""A partition: the file ranges [first, end) of a source."""

Ranges = npt.NDArray[Any]
Partitions = npt.NDArray[Any]
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class PlanFolder:
    """Reads and writes the files of a plan."""

    path: Path

    @property
    def files_path(self) -> Path:
        return self.path / "files"

    @property
    def ranges_path(self) -> Path:
        return self.path / "ranges"

    @property
    def partitions_path(self) -> Path:
        return self.path / "partitions"

    def cut_path(self, block: int) -> Path:
        """Return the path of the file ranges of a block, which the block's cut task writes."""
        return path_in_tree(self.path / "cuts", block, ".ranges")

    def write_files(self, listings: Iterable[FileListing]) -> None:
        """Write the files of all sources, block after block."""
        with write_file(self.files_path) as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for listing in listings:
                for block in listing.blocks:
                    writer.write_batch(block)

    def read_block(self, number: int) -> list[InputFile]:
        """Return the input files of a block."""
        return list(read_files(self._blocks.get_batch(number)))

    def write_cut(self, block: int, ranges: Ranges) -> None:
        """Write the file ranges of a block behind their checksum."""
        path = self.cut_path(block)
        path.parent.mkdir(exist_ok=True)
        with write_file(path) as file:
            file.write(xxhash.xxh3_128_digest(ranges.tobytes()))
            file.write(ranges.tobytes())

    def read_cut(self, block: int) -> Ranges | None:
        """Return the file ranges of a block; None where no task has written them, or the file is damaged."""
        try:
            content = read_file(self.cut_path(block), self.path)
        except FileNotFoundError:
            return None
        digest, ranges = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        is_whole = xxhash.xxh3_128_digest(ranges) == digest and len(ranges) % RANGE.itemsize == 0
        return np.frombuffer(ranges, RANGE) if is_whole else None

    def finish(self) -> None:
        """Write the checksums of the plan's files, after which a repeated command uses the plan as it is."""
        checksums = {path.name: xxh3_of(path) for path in self._checked}
        write_durably(self.path / PLAN, json.dumps(checksums, indent=1).encode())

    def is_finished(self) -> bool:
        """Return whether the plan is complete and undamaged. All of its files are read."""
        try:
            stored = parse_json(read_file(self.path / PLAN, self.path))
            return bool(stored == {path.name: xxh3_of(path) for path in self._checked})
        except (FileNotFoundError, ValueError):
            return False

    @property
    def _checked(self) -> tuple[Path, ...]:
        return self.files_path, self.ranges_path, self.partitions_path

    def read_partitions(self) -> Partitions:
        """Return all partitions in the order of the corpus: 40 bytes of memory for each."""
        return np.fromfile(self.partitions_path, PARTITION)

    def read_partition(self, index: int) -> InputPartition:
        """Return a partition. Adjacent ranges of a file are joined, so that the file is opened once for all of them."""
        partition = map_array(self.partitions_path, PARTITION)[index]
        ranges = map_array(self.ranges_path, RANGE)[partition["first"] : partition["end"]]
        return InputPartition(
            index=index,
            source=int(partition["source"]),
            pass_number=int(partition["pass_number"]),
            first_pass_index=int(partition["first_pass_index"]),
            file_ranges=tuple(_join_neighbours(self._read_ranges(ranges))),
        )

    def _read_ranges(self, ranges: Ranges) -> Iterator[FileRange]:
        number = -1
        for file, begin, end, size in ranges.tolist():
            if file // BLOCK_FILES != number:
                number, block = file // BLOCK_FILES, self._blocks.get_batch(file // BLOCK_FILES)
            [input_file] = read_files(block.slice(file % BLOCK_FILES, 1))
            yield FileRange(input_file, begin, end, size)

    @cached_property
    def _blocks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self.files_path)))


def _join_neighbours(file_ranges: Iterable[FileRange]) -> list[FileRange]:
    joined: list[FileRange] = []
    for file_range in file_ranges:
        if joined and (joined[-1].file, joined[-1].end) == (file_range.file, file_range.begin):
            first = joined.pop()
            joined.append(FileRange(file_range.file, first.begin, file_range.end, first.bytes + file_range.bytes))
        else:
            joined.append(file_range)
    return joined
