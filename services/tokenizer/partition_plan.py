"""Plans the partitions of a corpus: tasks cut the input files, and the command groups the file ranges.

The name and the size of a file decide whether it begins a new partition. So a file that is mended, added or removed
changes its own partitions and seldom a neighbour's, and the others are not encoded again. In a source of fewer than 128
files each file has partitions of its own.

Time: one open of every file, by tasks on all nodes, and about a microsecond of the command for a file range. Memory of
the command: 40 bytes for a partition; file ranges are read and written one block after another.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress
from services.common.recipe.schema import Recipe
from services.tokenizer.arrow_arrays import numbers_of
from services.tokenizer.atomic_file import write_file
from services.tokenizer.cut_task import CutTask, cut_block
from services.tokenizer.plan_folder import PARTITION, Partitions, PlanFolder, Ranges
from services.tokenizer.sources.documents import FORMATS
from services.tokenizer.sources.input_files import BLOCK_FILES, FileListing
from services.tokenizer.task_sequence import TaskSequence

_LOCAL_FILES_PER_WORKER, _REMOTE_FILES_PER_WORKER = 4_096, 256
"""Files for which a worker is started: one opens so many in about the time that another one takes to start."""
_LEAST_PARTITIONS = 64
"""Partitions that a source of as many files has at least, more or less. Each takes 5 ms beside the work on its text."""


def plan_partitions(folder: Path, recipe: Recipe, listings: Sequence[FileListing], launcher: Launcher) -> PlanFolder:
    """Cut the files into partitions of about `corpus.split_bytes`, and return the folder of the plan.

    A plan that an earlier command has finished there is used again, and so are the results of tasks. Raises
    `RecipeError` when the recipe does not fit a file, and `ArtifactError` when a file is damaged.
    """
    plan = PlanFolder(folder)
    if plan.is_finished():
        return plan
    (folder / "cuts").mkdir(parents=True, exist_ok=True)
    plan.write_files(listings)
    _cut(plan, recipe, listings, launcher)
    with write_file(plan.partitions_path) as file:
        file.write(_group(plan, recipe, listings).tobytes())
    plan.finish()
    return plan


def _cut(plan: PlanFolder, recipe: Recipe, listings: Sequence[FileListing], launcher: Launcher) -> None:
    sizes = [block.num_rows for listing in listings for block in listing.blocks]
    is_first = [number == 0 for listing in listings for number, _ in enumerate(listing.blocks)]
    tasks = TaskSequence(
        len(sizes),
        lambda block: CutTask(
            plan.path,
            block,
            recipe.corpus.split_bytes,
            recipe.corpus.max_document_bytes,
            requires_column=is_first[block] or sizes[block] == BLOCK_FILES,
        ),
    )
    done = 0
    with show_progress("plan", sum(sizes), "files") as progress:
        for block, _ in launcher.map_tasks(cut_block, tasks, _num_workers(recipe, listings)):
            done += sizes[block]
            progress.advance_to(done)


def _num_workers(recipe: Recipe, listings: Sequence[FileListing]) -> int:
    """Return the number of workers that the files are worth. A file that is not cut is worth none."""
    work = 0.0
    for listing in listings:
        files_per_worker = _REMOTE_FILES_PER_WORKER if "://" in listing[0].uri else _LOCAL_FILES_PER_WORKER
        for block in listing.blocks:
            formats = pc.unique(block.column("format")).to_pylist()
            if any(FORMATS[file_format].cut for file_format in formats):
                work += block.num_rows / files_per_worker
    return max(1, min(recipe.tokenizer.num_workers, math.ceil(work)))


def _group(plan: PlanFolder, recipe: Recipe, listings: Sequence[FileListing]) -> Partitions:
    """Write the file ranges of all blocks, and return the partitions in the order of the corpus.

    A source with a weight above 1 is read again only after all sources were read once. So the copies of a document are
    far apart, and no training sequence holds two of them.
    """
    split_bytes = recipe.corpus.split_bytes
    groups = [_Grouping(split_bytes) for _ in listings]
    block = first_range = 0
    with write_file(plan.ranges_path) as file:
        for grouping, listing in zip(groups, listings, strict=True):
            grouping.begin(first_range)
            for files in listing.blocks:
                ranges = plan.read_cut(block)
                if ranges is None:
                    raise ArtifactError(
                        f"{plan.cut_path(block)}: the result of a task was lost before it was used. Run the same "
                        f"command again."
                    )
                file.write(ranges.tobytes())
                grouping.add(ranges, _begin_partitions(files, len(listing), split_bytes))
                first_range += len(ranges)
                block += 1
    passes = [math.ceil(source.weight) for source in recipe.corpus.sources]
    begins = list(accumulate(map(len, groups), initial=0))
    ordered = [
        grouping.partitions(number, pass_number, begins[number])
        for pass_number in range(max(passes))
        for number, grouping in enumerate(groups)
        if pass_number < passes[number]
    ]
    return np.concatenate(ordered)


def _begin_partitions(block: pa.RecordBatch, num_files: int, split_bytes: int) -> npt.NDArray[np.bool_]:
    """Mark the files of a block that begin a new partition, in a source of so many files.

    A file of `split_bytes` is always marked, and of small files every n-th, by the hash of its name, so that there are
    not too many partitions; n changes where the number of files doubles.
    """
    files_per_partition = 2 ** max(0, (num_files // _LEAST_PARTITIONS).bit_length() - 1)
    shares = np.maximum(numbers_of(block.column("bytes")) / split_bytes, 1 / files_per_partition)
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, block.column("name").to_pylist()), np.uint64, block.num_rows)
    is_first: npt.NDArray[np.bool_] = hashes / 2.0**64 < shares
    return is_first


class _Grouping:
    """Groups consecutive file ranges into groups of at most `split_bytes`. A larger range is alone in its group."""

    def __init__(self, split_bytes: int) -> None:
        self._split_bytes = split_bytes
        self._room = 0
        self._next = 0
        self._file = -1
        self._firsts, self._sizes = array("q"), array("q")

    def begin(self, first_range: int) -> None:
        """Begin a source, whose first file range has this number among the ranges of all sources."""
        self._next = first_range

    def add(self, ranges: Ranges, begins_partition: npt.NDArray[np.bool_]) -> None:
        """Add the next file ranges of the source, those of one block, whose files `begins_partition` marks."""
        for file, size in zip(ranges["file"].tolist(), ranges["bytes"].tolist(), strict=True):
            begins = file != self._file and begins_partition[file % BLOCK_FILES]
            self._file = file
            if not self._firsts or begins or size > self._room:
                self._firsts.append(self._next)
                self._sizes.append(0)
                self._room = self._split_bytes
            self._room -= size
            self._sizes[-1] += size
            self._next += 1

    def __len__(self) -> int:
        return len(self._firsts)

    def partitions(self, source: int, pass_number: int, first_index: int) -> Partitions:
        """Return the groups as partitions of one pass. `first_index` is that of the source in the first pass."""
        partitions = np.empty(len(self), PARTITION)
        partitions["first_pass_index"] = np.arange(first_index, first_index + len(self))
        partitions["source"], partitions["pass_number"] = source, pass_number
        partitions["first"] = self._firsts
        partitions["end"] = [*self._firsts[1:], self._next]
        partitions["bytes"] = self._sizes
        return partitions
