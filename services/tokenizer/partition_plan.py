"""The plan of a corpus: which file ranges each encode task reads, in a few flat files that a task maps.

    files         the input files, in blocks of BLOCK_FILES: an Arrow file
    ranges        the file ranges of all blocks, 32 bytes each
    partitions    the partitions, 40 bytes each: a source, a pass, and a run of file ranges
    plan.json     checksums of the files above; it is written last

Tasks on all nodes cut the input files: they read a footer or a first line of those that are not cut by size alone.

The name and the size of a file decide whether it begins a new partition. So a file that is mended, added or removed
changes its own partitions and seldom a neighbour's. In a source of fewer than 128 files each has its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import write_durably
from services.common.launch.launcher import Launcher
from services.common.recipe.schema import Recipe
from services.tokenizer.sources.documents import cut_file
from services.tokenizer.sources.input_files import (
    BLOCK_FILES,
    SCHEMA,
    FileListing,
    FileRange,
    InputFile,
    InputPartition,
    read_files,
)
from services.tokenizer.sources.jsonl import require_key
from services.tokenizer.tasks import TaskSequence, map_array, run_largest_first, write_file

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
_FILES, _RANGES, _PARTITIONS, _CHECKSUMS = "files", "ranges", "partitions", "plan.json"
_MIN_PARTITIONS = 64
"""Partitions that a source of as many files has at least, more or less. Each takes 5 ms beside the work on its text."""

Ranges = npt.NDArray[Any]
Partitions = npt.NDArray[Any]


@dataclass(frozen=True)
class CutTask:
    """The input of `cut_block`, which is sent to a worker process."""

    plan: Path
    block: int
    split_bytes: int


def plan_partitions(folder: Path, recipe: Recipe, listings: Sequence[FileListing], launcher: Launcher) -> PlanFolder:
    """Cut the files into partitions of about `corpus.split_bytes`, unless the folder has the plan already.

    Raises `RecipeError` for a file without the column, and `ArtifactError` for a damaged one.
    """
    plan = PlanFolder(folder)
    if plan.is_finished():
        return plan
    for listing in listings:
        require_key(islice(listing, BLOCK_FILES), recipe.corpus.max_document_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    plan.write_files(listings)
    ranges = _cut(plan, recipe, listings, launcher)
    plan.finish(np.concatenate(ranges), _group(ranges, recipe, listings))
    return plan


def cut_block(task: CutTask) -> Ranges:
    """Return the file ranges of a block of files."""
    files = PlanFolder(task.plan).read_block(task.block)
    cut = [
        (BLOCK_FILES * task.block + row, file_range.begin, file_range.end, file_range.bytes)
        for row, file in enumerate(files)
        for file_range in cut_file(file, task.split_bytes)
    ]
    return np.array(cut, RANGE)


def _cut(plan: PlanFolder, recipe: Recipe, listings: Sequence[FileListing], launcher: Launcher) -> list[Ranges]:
    """Return the file ranges of every block."""
    sizes = [block.num_rows for listing in listings for block in listing.blocks]
    tasks = TaskSequence(len(sizes), lambda block: CutTask(plan.path, block, recipe.corpus.split_bytes))
    # A process opens the local files of 16 blocks in about the time that another one takes to start.
    is_remote = any("://" in listing[0].uri for listing in listings)
    num_workers = min(recipe.tokenizer.num_workers, len(sizes) if is_remote else -(-len(sizes) // 16))
    return run_largest_first(launcher, cut_block, tasks, np.array(sizes), num_workers, title="plan", unit="files")


def _group(blocks: Sequence[Ranges], recipe: Recipe, listings: Sequence[FileListing]) -> Partitions:
    """Return the partitions of the blocks' file ranges in the order of the corpus.

    A source with a weight above 1 is read again only after all sources were read once, so that no training sequence
    holds two copies of a document.
    """
    sources: list[Partitions] = []
    num_blocks = num_ranges = num_partitions = 0
    for number, listing in enumerate(listings):
        ranges = np.concatenate(blocks[num_blocks : num_blocks + len(listing.blocks)])
        is_first_of_file = np.diff(ranges["file"], prepend=-1) != 0
        begins_partition = _begin_partitions(listing, recipe.corpus.split_bytes)
        begins = is_first_of_file & begins_partition[ranges["file"] - BLOCK_FILES * num_blocks]
        firsts = _split(ranges["bytes"], begins, recipe.corpus.split_bytes)
        ends = np.append(firsts[1:], len(ranges))[: len(firsts)]
        bytes_before = np.append(0, np.cumsum(ranges["bytes"]))
        partitions = np.zeros(len(firsts), PARTITION)
        partitions["source"] = number
        partitions["first_pass_index"] = num_partitions + np.arange(len(firsts))
        partitions["first"], partitions["end"] = num_ranges + firsts, num_ranges + ends
        partitions["bytes"] = bytes_before[ends] - bytes_before[firsts]
        sources.append(partitions)
        num_blocks += len(listing.blocks)
        num_ranges += len(ranges)
        num_partitions += len(firsts)
    passes = [math.ceil(source.weight) for source in recipe.corpus.sources]
    ordered: list[Partitions] = []
    for pass_number in range(max(passes)):
        for partitions, num_passes in zip(sources, passes, strict=True):
            if pass_number < num_passes:
                ordered.append(partitions.copy())
                ordered[-1]["pass_number"] = pass_number
    return np.concatenate(ordered)


def _split(sizes: npt.NDArray[np.int64], begins: npt.NDArray[np.bool_], split_bytes: int) -> npt.NDArray[np.int64]:
    """Split file ranges into groups of at most `split_bytes`, or of one larger range. Return where each group begins.

    `begins` marks ranges that begin a group in any case.
    """
    firsts: list[int] = []
    room = 0
    for number, (size, is_first) in enumerate(zip(sizes.tolist(), begins.tolist(), strict=True)):
        if not firsts or is_first or size > room:
            firsts.append(number)
            room = split_bytes
        room -= size
    return np.array(firsts, np.int64)


def _begin_partitions(listing: FileListing, split_bytes: int) -> npt.NDArray[np.bool_]:
    """Mark the files of a source that begin a new partition: large ones, and every n-th small one by its name's hash.

    n changes where the number of files doubles.
    """
    files_per_partition = 2 ** max(0, (len(listing) // _MIN_PARTITIONS).bit_length() - 1)
    names = (name for block in listing.blocks for name in block.column("name").to_pylist())
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, names), np.uint64, len(listing))
    return hashes / 2.0**64 < np.maximum(listing.sizes / split_bytes, 1 / files_per_partition)


@dataclass(frozen=True)
class PlanFolder:
    """Reads and writes the files of a plan. A task reads its own part alone."""

    path: Path

    def write_files(self, listings: Iterable[FileListing]) -> None:
        """Write the files of all sources, block after block."""
        with write_file(self.path / _FILES) as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for listing in listings:
                for block in listing.blocks:
                    writer.write_batch(block)

    def finish(self, ranges: Ranges, partitions: Partitions) -> None:
        """Write the rest of the plan, and last the checksums of all files."""
        for name, values in ((_RANGES, ranges), (_PARTITIONS, partitions)):
            with write_file(self.path / name) as file:
                file.write(values.tobytes())
        write_durably(self.path / _CHECKSUMS, json.dumps(self._checksums(), indent=1).encode())

    def is_finished(self) -> bool:
        """Return whether the plan is complete and undamaged. All of its files are read."""
        try:
            return bool(json.loads((self.path / _CHECKSUMS).read_bytes()) == self._checksums())
        except (FileNotFoundError, ValueError):
            return False

    def _checksums(self) -> dict[str, str]:
        return {name: xxh3_of(self.path / name) for name in (_FILES, _RANGES, _PARTITIONS)}

    def read_block(self, number: int) -> list[InputFile]:
        """Return the input files of a block."""
        return list(read_files(self._blocks.get_batch(number)))

    def read_partitions(self) -> Partitions:
        """Return all partitions in the order of the corpus: 40 bytes of memory for each."""
        return np.fromfile(self.path / _PARTITIONS, PARTITION)

    def read_partition(self, index: int) -> InputPartition:
        """Return a partition. Adjacent ranges of a file are joined, so that the file is opened once for all of them."""
        partition = map_array(self.path / _PARTITIONS, PARTITION)[index]
        ranges = map_array(self.path / _RANGES, RANGE)[partition["first"] : partition["end"]]
        joined: list[tuple[int, int, int, int]] = []
        for file, begin, end, size in ranges.tolist():
            if joined and joined[-1][::2] == (file, begin):
                _, first, _, size_before = joined.pop()
                joined.append((file, first, end, size_before + size))
            else:
                joined.append((file, begin, end, size))
        return InputPartition(
            index=index,
            source=int(partition["source"]),
            pass_number=int(partition["pass_number"]),
            first_pass_index=int(partition["first_pass_index"]),
            file_ranges=tuple(self._read_ranges(joined)),
        )

    def _read_ranges(self, ranges: Iterable[tuple[int, int, int, int]]) -> Iterator[FileRange]:
        number = -1
        for file, begin, end, size in ranges:
            if file // BLOCK_FILES != number:
                number, block = file // BLOCK_FILES, self._blocks.get_batch(file // BLOCK_FILES)
            [input_file] = read_files(block.slice(file % BLOCK_FILES, 1))
            yield FileRange(input_file, begin, end, size)

    @cached_property
    def _blocks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self.path / _FILES)))
