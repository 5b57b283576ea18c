"""Finds exact duplicates: documents whose normalised bytes an earlier document of the corpus has, too.

Three phases of tasks find all but the first document of each digest, in the order of the corpus:

1. digest: a task reads a group of neighbouring partitions, and writes the digests of their documents, sorted, and once
   each: which documents repeat another one of the group is known by then.
2. find: a task takes one bucket, which is a range of digests, from the files of all groups, sorts it, and writes the
   positions of all documents but the first of each digest.
3. list: a task takes the duplicates of one group from the files of all buckets. An encode task reads one such list.

The text is read once, and 24 bytes are written and read for each document. The phases open `groups * (2 * buckets + 1)`
files, and the encode tasks one for each partition. A task of the first phase holds 130 bytes for each document of its
group, of which 16 are the digest, and one of the second 60 bytes for each of DIGESTS_PER_BUCKET digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.manifest import ManifestModel
from services.common.launch.launcher import Launcher
from services.common.recipe.schema import Corpus
from services.tokenizer.document_hashes import digest_documents
from services.tokenizer.partition_plan import PlanFolder
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.tasks import map_array, path_in_tree, read_marker, run_largest_first, write_file, write_marker

DIGESTS_PER_BUCKET = 2**23
"""Digests of a bucket, give or take a per mille, because digests are spread evenly. A task sorts them in 0.5 GB."""
MAX_GROUPS = 4_096
"""Most groups of partitions, because every bucket is read from the files of all groups."""
_NUMBER_BITS = 36

Positions = npt.NDArray[np.uint64]
"""Places of documents in the corpus. The high 28 bits of a position are the partition's index, and the low 36 bits the
document's number among all documents that are read from the partition. Rising positions are the corpus's order."""


@dataclass(frozen=True)
class Duplicates:
    """The duplicates of all partitions of a corpus."""

    folder: Path
    partitions_per_group: int

    def read(self, first_pass_index: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the duplicates among the documents of a partition of the first pass, rising."""
        path = _list_path(self.folder, first_pass_index // self.partitions_per_group)
        own = _select(path, first_pass_index, first_pass_index + 1)
        return (own - _position(first_pass_index)).astype(np.int64)


@dataclass(frozen=True)
class DigestTask:
    """The input of `digest_group`, which is sent to a worker process."""

    folder: Path
    group: int
    partitions: range
    """Indices of the group's partitions."""
    plan: Path
    corpus: Corpus


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
    """Checksum of the results of all digest and find tasks."""


class WrittenFile(ManifestModel):
    """The result of a task: one file. Its JSON is the task's marker."""

    inputs: str
    """What the file was made of. A task of other inputs makes its file again."""
    documents: int
    """Different digests in the first file of a group, and positions in that of a bucket and in a list."""
    xxh3: str


def find_duplicates(
    folder: Path,
    plan: PlanFolder,
    corpus: Corpus,
    launcher: Launcher,
    num_workers: int,
    digests_per_bucket: int = DIGESTS_PER_BUCKET,
    max_groups: int = MAX_GROUPS,
) -> Duplicates:
    """Write the positions of all duplicates in the first pass over each source into the partition folder.

    They are the same for partitions, groups and buckets of any size.
    """
    partitions = plan.read_partitions()
    bytes_of_partitions = partitions["bytes"][partitions["pass_number"] == 0]
    count = len(bytes_of_partitions)
    per_group = max(1, -(-count // max_groups))
    groups = [range(begin, min(begin + per_group, count)) for begin in range(0, count, per_group)]
    digest_tasks = [DigestTask(folder, number, group, plan.path, corpus) for number, group in enumerate(groups)]
    sizes = np.array([bytes_of_partitions[group.start : group.stop].sum() for group in groups], np.int64)
    digests = run_largest_first(
        launcher, digest_group, digest_tasks, sizes, num_workers, title="digest documents", unit="bytes"
    )
    num_buckets = max(1, -(-sum(file.documents for file in digests) // digests_per_bucket))
    checksum = _checksum_of(digests)
    find_tasks = [FindTask(folder, bucket, num_buckets, len(groups), checksum) for bucket in range(num_buckets)]
    ones = np.ones(num_buckets, np.int64)
    found = run_largest_first(
        launcher, find_in_bucket, find_tasks, ones, num_workers, title="find duplicates", unit="buckets"
    )
    checksum = _checksum_of([*digests, *found])
    list_tasks = [ListTask(folder, number, group, num_buckets, checksum) for number, group in enumerate(groups)]
    # The lists of a corpus of one bucket are made sooner than another process starts.
    num_workers = min(num_workers, num_buckets)
    ones = np.ones(len(groups), np.int64)
    run_largest_first(launcher, list_group, list_tasks, ones, num_workers, title="list duplicates", unit="lists")
    return Duplicates(folder, per_group)


def _checksum_of(files: Iterable[WrittenFile]) -> str:
    return xxhash.xxh3_128_hexdigest(" ".join(file.xxh3 for file in files).encode())


def digest_group(task: DigestTask) -> WrittenFile:
    """Write the digests of the documents of a group's partitions, unless the file is complete.

    The file is an array of uint64: a number n, n high halves of digests, n low halves, n positions, and the positions
    of documents that repeat one of the n, rising. The n digests are different, and in rising order. Documents without
    a byte and those below `corpus.min_document_bytes` have no digest.
    """
    inputs = f"partitions {task.partitions}"
    return _write_once(_digests_path(task.folder, task.group), inputs, lambda: _digest(task))


def find_in_bucket(task: FindTask) -> WrittenFile:
    """Write the positions of the documents, rising, whose digest an earlier group has, too, unless they are written."""
    inputs = f"bucket {task.bucket} of {task.num_buckets} of {task.inputs_xxh3}"
    return _write_once(_bucket_path(task.folder, task.bucket), inputs, lambda: _find(task))


def list_group(task: ListTask) -> WrittenFile:
    """Write the positions of a group's duplicates, rising, unless the file is complete."""
    inputs = f"partitions {task.partitions} of {task.inputs_xxh3}"
    return _write_once(_list_path(task.folder, task.group), inputs, lambda: _list(task))


def _digest(task: DigestTask) -> tuple[int, npt.NDArray[np.uint64]]:
    corpus = task.corpus
    digests: list[bytes] = []
    positions: list[Positions] = [np.empty(0, np.uint64)]
    plan = PlanFolder(task.plan)
    for partition in map(plan.read_partition, task.partitions):
        read = 0
        bad_rows = BadRows(corpus.bad_rows)  # the encode tasks count them
        for batch in read_documents(partition.file_ranges, corpus.invalid_utf8, corpus.max_document_bytes, bad_rows):
            is_wanted = batch.sizes >= max(1, corpus.min_document_bytes)
            digests.append(digest_documents(batch.select(is_wanted)))
            positions.append(_position(partition.index) + (read + np.flatnonzero(is_wanted)).astype(np.uint64))
            read += len(batch)
    high, low = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2).T
    columns, is_repeated = _sort(np.stack([high, low, np.concatenate(positions)]))
    first = columns[:, ~is_repeated]
    repeated = np.sort(columns[2, is_repeated])
    return first.shape[1], np.concatenate([np.array([first.shape[1]], np.uint64), first.ravel(), repeated])


def _read_digests(folder: Path, group: int) -> tuple[npt.NDArray[np.uint64], Positions]:
    """Return the columns of digests and positions of a group, and the positions of its repeated documents."""
    values = map_array(_digests_path(folder, group), np.uint64)
    end = 1 + 3 * int(values[0])
    return values[1:end].reshape(3, -1), values[end:]


def _find(task: FindTask) -> tuple[int, Positions]:
    least = task.bucket * 2**64 // task.num_buckets
    largest = (task.bucket + 1) * 2**64 // task.num_buckets - 1
    slices = [np.empty((3, 0), np.uint64)]
    for group in range(task.num_groups):
        columns, _ = _read_digests(task.folder, group)
        first = np.searchsorted(columns[0], np.uint64(least), "left")
        end = np.searchsorted(columns[0], np.uint64(largest), "right")
        slices.append(columns[:, first:end])
    columns, is_repeated = _sort(np.concatenate(slices, axis=1))
    repeated = np.sort(columns[2, is_repeated])
    return len(repeated), repeated


def _sort(columns: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Sort columns of digests and positions by digest, and mark all columns of each digest but the first.

    The sort is stable: columns of one digest stay in the order of the corpus.
    """
    high, low, _ = columns = columns[:, np.lexsort((columns[1], columns[0]))]
    is_repeated = np.zeros(len(high), np.bool_)
    is_repeated[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return columns, is_repeated


def _list(task: ListTask) -> tuple[int, Positions]:
    _, repeated = _read_digests(task.folder, task.group)
    paths = [_bucket_path(task.folder, bucket) for bucket in range(task.num_buckets)]
    found = [_select(path, task.partitions.start, task.partitions.stop) for path in paths]
    duplicates = np.sort(np.concatenate([repeated, *found]))
    return len(duplicates), duplicates


def _select(path: Path, first: int, end: int) -> Positions:
    """Return the positions in a file that are in partitions [first, end)."""
    positions = map_array(path, np.uint64)
    return positions[slice(*np.searchsorted(positions, np.array([_position(first), _position(end)])))]


def _position(partition: int) -> np.uint64:
    """Return the position of the first document of a partition."""
    return np.uint64(partition << _NUMBER_BITS)


def _write_once(path: Path, inputs: str, make: Callable[[], tuple[int, npt.NDArray[np.uint64]]]) -> WrittenFile:
    """Write the array that `make` returns with a number of documents, unless the marker of the inputs fits it."""
    marker_path = path.with_name(f"{path.name}.json")
    done = read_marker(marker_path, WrittenFile, lambda result: {path: result.xxh3})
    if done and done.inputs == inputs:
        return done
    documents, values = make()
    path.parent.mkdir(exist_ok=True)
    with write_file(path) as file:
        file.write(values.data)
    written = WrittenFile(inputs=inputs, documents=documents, xxh3=xxhash.xxh3_128_hexdigest(values.data))
    write_marker(marker_path, written)
    return written


def _digests_path(folder: Path, group: int) -> Path:
    return path_in_tree(folder, group, ".digests")


def _bucket_path(folder: Path, bucket: int) -> Path:
    return path_in_tree(folder, bucket, ".bucket")


def _list_path(folder: Path, group: int) -> Path:
    return path_in_tree(folder, group, ".duplicates")
