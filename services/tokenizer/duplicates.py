"""Finds exact duplicates: documents whose normalised bytes an earlier document of the corpus has, too.

The order of the corpus decides which of several equal documents is kept: the first one, in the first source of the
recipe that has the document. Three phases of tasks find the others:

1. digest: a task reads a group of neighbouring partitions, and writes the digests of their documents, sorted.
2. find: a task takes one bucket, which is a range of digests, from the files of all groups, sorts it, and writes the
   positions of all documents but the first of each digest.
3. list: a task takes the duplicates of one group from the files of all buckets.

An encode task reads the duplicates of its partition from the list of its group. The phases read the text once, and they
write and read 24 bytes for each document. They open `2 * groups * buckets` files and some more for each task, and there
are at most MAX_GROUPS groups: a corpus of 20 billion documents has 2,400 buckets, and costs 20 million opens by all
tasks together. A task of the first phase holds about 100 bytes for each document of its group, and a task of the second
60 bytes for each of DOCUMENTS_PER_BUCKET documents, whatever the size of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.manifest import ManifestModel
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress
from services.common.recipe.schema import Corpus
from services.tokenizer.atomic_file import write_file
from services.tokenizer.document_digest import digest_documents
from services.tokenizer.plan_folder import PlanFolder
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.task_marker import read_marker, write_marker

DOCUMENTS_PER_BUCKET = 2**23
"""Documents of a bucket, give or take a per mille, because digests are spread evenly. A task sorts them in 0.5 GB."""
MAX_GROUPS = 4_096
"""Most groups of partitions. Every bucket is read from the files of all groups, and with a file for each of 745,000
partitions (50 TB of text) the tasks would open 180 times as many files."""
_NUMBER_BITS = 36

T = TypeVar("T")
Positions = npt.NDArray[np.uint64]
"""Places of documents in the corpus. The high 28 bits of a position are the partition's index, and the low 36 bits the
document's number among all documents that are read from the partition. Rising positions are the corpus's order."""


@dataclass(frozen=True)
class DuplicateList:
    """The duplicates of one partition, as a worker reads them."""

    path: Path
    """File of the positions of all duplicates in the partition's group, rising."""
    partition: int
    """Index of the partition with the same file ranges in the first pass over its source."""

    def read(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the duplicates among the documents that are read from the partition, rising."""
        return (_select(self.path, self.partition, self.partition + 1) - _position(self.partition)).astype(np.int64)


@dataclass(frozen=True)
class DuplicateLists:
    """The duplicates of all partitions of a corpus."""

    folder: Path
    partitions_per_group: int

    def of_partition(self, first_pass_index: int) -> DuplicateList:
        """Return the list for the partitions of all passes that read the same file ranges as this one of the first."""
        return DuplicateList(_list_path(self.folder, first_pass_index // self.partitions_per_group), first_pass_index)


@dataclass(frozen=True)
class DigestTask:
    """The input of `digest_group`, which is sent to a worker process."""

    folder: Path
    group: int
    plan: Path
    """Folder of the plan."""
    partitions: range
    """Indices of the group's partitions."""
    min_document_bytes: int
    max_document_bytes: int
    invalid_utf8: Literal["replace", "reject"]


@dataclass(frozen=True)
class FindTask:
    """The input of `find_in_bucket`, which is sent to a worker process."""

    folder: Path
    bucket: int
    num_buckets: int
    num_groups: int
    inputs_xxh3: str
    """Checksum of the results of all digest tasks."""


@dataclass(frozen=True)
class ListTask:
    """The input of `list_group`, which is sent to a worker process."""

    folder: Path
    group: int
    partitions: range
    """Indices of the group's partitions."""
    num_buckets: int
    inputs_xxh3: str
    """Checksum of the results of all find tasks."""


class WrittenFile(ManifestModel):
    """The result of each of the three tasks: one file. Its JSON is the task's marker."""

    inputs: str
    """What the file was made of. A task of other inputs makes its file again."""
    documents: int
    """Documents that the file has a column or a position of."""
    xxh3: str


def find_duplicates(
    folder: Path,
    plan: PlanFolder,
    corpus: Corpus,
    launcher: Launcher,
    num_workers: int,
    documents_per_bucket: int = DOCUMENTS_PER_BUCKET,
    max_groups: int = MAX_GROUPS,
) -> DuplicateLists:
    """Write the lists of duplicates below `folder`, and return where the list of each partition is.

    Only partitions of the first pass over each source are read, which come first in a plan. The same documents are
    found for partitions, groups and buckets of any size, for any number of workers, and after a crash. A task whose
    file is complete is not run again.
    """
    folder.mkdir(exist_ok=True)
    count = int((plan.read_partitions()["pass_number"] == 0).sum())
    per_group = max(1, -(-count // max_groups))
    groups = [range(begin, min(begin + per_group, count)) for begin in range(0, count, per_group)]
    digest_tasks = [
        DigestTask(
            folder=folder,
            group=number,
            plan=plan.path,
            partitions=group,
            min_document_bytes=corpus.min_document_bytes,
            max_document_bytes=corpus.max_document_bytes,
            invalid_utf8=corpus.invalid_utf8,
        )
        for number, group in enumerate(groups)
    ]
    digests = _run(launcher, digest_group, digest_tasks, num_workers, "digest documents")
    num_buckets = max(1, -(-sum(file.documents for file in digests) // documents_per_bucket))
    inputs_xxh3 = _checksum_of(digests)
    find_tasks = [FindTask(folder, bucket, num_buckets, len(groups), inputs_xxh3) for bucket in range(num_buckets)]
    found = _run(launcher, find_in_bucket, find_tasks, num_workers, "find duplicates")
    inputs_xxh3 = _checksum_of(found)
    list_tasks = [ListTask(folder, number, group, num_buckets, inputs_xxh3) for number, group in enumerate(groups)]
    # The lists of a corpus of one bucket are made sooner than another process starts.
    _run(launcher, list_group, list_tasks, min(num_workers, num_buckets), "list duplicates")
    return DuplicateLists(folder, per_group)


def _run(
    launcher: Launcher, function: Callable[[T], WrittenFile], tasks: Sequence[T], num_workers: int, title: str
) -> list[WrittenFile]:
    """Run the tasks, and return their results in the order of the tasks."""
    results: dict[int, WrittenFile] = {}
    with show_progress(title, len(tasks), "tasks") as progress:
        for index, result in launcher.map_tasks(function, tasks, num_workers):
            results[index] = result
            progress.advance_to(len(results))
    return [results[index] for index in range(len(tasks))]


def _checksum_of(files: Iterable[WrittenFile]) -> str:
    return xxhash.xxh3_128_hexdigest(" ".join(file.xxh3 for file in files).encode())


def digest_group(task: DigestTask) -> WrittenFile:
    """Write the digests of the documents of a group's partitions, unless the file is complete.

    The file has three rows of uint64: the high halves of the digests, their low halves, and the documents' positions.
    Its columns are sorted. Documents without a byte and those below `corpus.min_document_bytes` have no column.
    """
    first, last = task.partitions[0], task.partitions[-1]
    return _write_once(_digests_path(task.folder, task.group), f"partitions {first} to {last}", lambda: _digest(task))


def find_in_bucket(task: FindTask) -> WrittenFile:
    """Write the positions of a bucket's duplicates, rising, unless the file is complete."""
    path = _bucket_path(task.folder, task.bucket)
    return _write_once(path, f"{task.num_buckets} buckets of {task.inputs_xxh3}", lambda: _find(task))


def list_group(task: ListTask) -> WrittenFile:
    """Write the positions of a group's duplicates, rising, unless the file is complete."""
    inputs = f"partitions {task.partitions} of {task.inputs_xxh3}"
    return _write_once(_list_path(task.folder, task.group), inputs, lambda: _list(task))


def _digest(task: DigestTask) -> npt.NDArray[np.uint64]:
    digests: list[bytes] = []
    positions: list[Positions] = [np.empty(0, np.uint64)]
    plan = PlanFolder(task.plan)
    for partition in map(plan.read_partition, task.partitions):
        read = 0
        for batch in read_documents(partition.file_ranges, task.invalid_utf8, task.max_document_bytes):
            is_wanted = batch.sizes >= max(1, task.min_document_bytes)
            digests.append(digest_documents(batch.select(is_wanted)))
            positions.append(_position(partition.index) + (read + np.flatnonzero(is_wanted)).astype(np.uint64))
            read += len(batch)
    high, low = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2).T
    return _sort(np.stack([high, low, np.concatenate(positions)]))


def _find(task: FindTask) -> Positions:
    slices = []
    for group in range(task.num_groups):
        columns = _map(_digests_path(task.folder, group)).reshape(3, -1)
        ends = [task.bucket * 2**64 // task.num_buckets, (task.bucket + 1) * 2**64 // task.num_buckets - 1]
        first = np.searchsorted(columns[0], np.uint64(ends[0]), "left")
        last = np.searchsorted(columns[0], np.uint64(ends[1]), "right")
        slices.append(columns[:, first:last])
    high, low, positions = _sort(np.concatenate(slices, axis=1))
    is_duplicate = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return np.sort(positions[1:][is_duplicate])


def _sort(columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Sort columns by their digests. The sort is stable, so that columns of one digest stay in the corpus's order."""
    high, low, _ = columns
    return columns[:, np.lexsort((low, high))]


def _list(task: ListTask) -> Positions:
    paths = [_bucket_path(task.folder, bucket) for bucket in range(task.num_buckets)]
    return np.sort(np.concatenate([_select(path, task.partitions.start, task.partitions.stop) for path in paths]))


def _select(path: Path, first: int, end: int) -> Positions:
    """Return the positions in a file that are in partitions [first, end)."""
    positions = _map(path)
    return positions[slice(*np.searchsorted(positions, np.array([_position(first), _position(end)])))]


def _position(partition: int) -> np.uint64:
    """Return the position of the first document of a partition."""
    return np.uint64(partition << _NUMBER_BITS)


def _map(path: Path) -> npt.NDArray[np.uint64]:
    """Return the content of a file as an array; an empty file cannot be mapped."""
    return np.asarray(np.memmap(path, np.uint64, mode="r")) if path.stat().st_size else np.empty(0, np.uint64)


def _write_once(path: Path, inputs: str, make: Callable[[], npt.NDArray[np.uint64]]) -> WrittenFile:
    """Write an array to `path` and then its marker, unless the marker of the same inputs fits the file."""
    marker_path = path.with_name(f"{path.name}.json")
    done = read_marker(marker_path, path.parent, WrittenFile, lambda result: {path: result.xxh3})
    if done and done.inputs == inputs:
        return done
    values = np.ascontiguousarray(make())
    with write_file(path) as file:
        file.write(values.data)
    written = WrittenFile(inputs=inputs, documents=values.shape[-1], xxh3=xxhash.xxh3_128_hexdigest(values.data))
    write_marker(marker_path, written)
    return written


def _digests_path(folder: Path, group: int) -> Path:
    return folder / f"group-{group:05d}.digests"


def _bucket_path(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket:05d}.duplicates"


def _list_path(folder: Path, group: int) -> Path:
    return folder / f"group-{group:05d}.duplicates"
