"""Counts the n-grams of the validation split that are in the training split, too.

A loss on text that a model has trained on is no loss on new text. Equal documents are in one split, but a license or a
quotation can be in documents of both. So the n-grams of the validation split become a hash table, tasks on the workers
look up those of each partition's training documents, and the counts go into the manifest.

Every token of the training split is read once, and every token of the validation split twice. A task writes the slots
of the table that it found, at most four bytes for a token, and a marker: when a command is repeated, a task whose
marker fits its file is not run again. A task takes a nanosecond for each slot, and there are at most 4,194,304.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from services.common.artifacts.corpus import Split
from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import ManifestModel
from services.common.input.files import read_file
from services.common.launch.launcher import Launcher
from services.common.process.telemetry import show_progress
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encode_task import EncodedPartition, EncodeTask
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.encoding.ngram_kernel import (
    NGRAM_TOKENS,
    add_hashes,
    compile_ngram_kernels,
    find_hashes,
    hash_ngrams,
)

MAX_NGRAMS = 2**20
"""Most n-grams of the validation split that are looked up, which bounds the table to 32 MiB. A larger split is sampled
by the n-grams' hashes, and so is the training split. With so many n-grams a share of 13 % has a standard error of
0.03 %."""
TOKENS_PER_WORKER = 2**26
"""Training tokens for which a worker is started; one looks up so many in about the time that another takes to start."""
_LARGEST_HASH = 2**64 - 1
_BLOCK_TOKENS = 2**16

Hashes = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class NgramOverlap:
    """Numbers of n-grams of the validation split; one that is there twice counts twice."""

    ngrams: int = 0
    ngrams_in_train: int = 0


@dataclass(frozen=True)
class OverlapTask:
    """The input of `find_ngrams`, which is sent to a worker process."""

    encoded: EncodeTask
    """The task that encoded the partition."""
    tokens_xxh3: str
    """Checksum of the partition's training tokens."""
    table_path: Path
    table_xxh3: str
    limit: int
    """Largest hash of an n-gram in the table."""

    @property
    def slots_path(self) -> Path:
        return self.encoded.marker_path.with_suffix(".ngrams")

    @property
    def marker_path(self) -> Path:
        return self.encoded.marker_path.with_suffix(".ngrams.json")


class FoundNgrams(ManifestModel):
    """The result of a task. Its JSON is the task's marker."""

    tokens_xxh3: str
    table_xxh3: str
    slots_xxh3: str


def count_overlap(
    tasks: Sequence[EncodeTask],
    encoded: Sequence[EncodedPartition],
    launcher: Launcher,
    num_workers: int,
    max_ngrams: int = MAX_NGRAMS,
) -> list[NgramOverlap]:
    """Return the counts of each partition's validation documents, in the order of the tasks."""
    num_tokens = sum(partition.parts["validation"].document_tokens for partition in encoded)
    if num_tokens == 0:
        return [NgramOverlap()] * len(tasks)
    limit = _LARGEST_HASH * min(num_tokens, max_ngrams) // num_tokens
    table = np.zeros(1 << (2 * min(num_tokens, max_ngrams)).bit_length(), np.uint64)
    for task in tasks:
        for hashes in _hash_part(task, "validation", limit):
            add_hashes(hashes, table)
    table_path = tasks[0].scratch / "validation.ngrams"
    with write_file(table_path) as file:
        file.write(table.data)
    table_xxh3 = xxhash.xxh3_128_hexdigest(table.data)
    overlap_tasks = [
        OverlapTask(task, partition.parts["train"].tokens_xxh3, table_path, table_xxh3, limit)
        for task, partition in zip(tasks, encoded, strict=True)
    ]
    is_in_train = np.zeros(len(table), np.bool_)
    train_tokens = sum(partition.parts["train"].tokens for partition in encoded)
    num_workers = min(num_workers, 1 + train_tokens // TOKENS_PER_WORKER)
    with show_progress("overlap", train_tokens, "tokens") as progress:
        done_tokens = 0
        for index, _ in launcher.map_tasks(find_ngrams, overlap_tasks, num_workers):
            is_in_train[np.fromfile(overlap_tasks[index].slots_path, np.uint32)] = True
            done_tokens += encoded[index].parts["train"].tokens
            progress.advance_to(done_tokens)
    table.flags.writeable = False
    counts = []
    for task in tasks:
        slots = [_find(hashes, table) for hashes in _hash_part(task, "validation", limit)]
        ngrams = sum(map(len, slots))
        counts.append(NgramOverlap(ngrams, sum(int(is_in_train[each].sum()) for each in slots)))
    return counts


def find_ngrams(task: OverlapTask) -> FoundNgrams:
    """Run the task, unless its file is complete. Two processes that run the same task write the same bytes."""
    return _read_marker(task) or _find_ngrams(task)


def _read_marker(task: OverlapTask) -> FoundNgrams | None:
    """Return the result of a task that was run before, or None when its file is incomplete or of other input."""
    try:
        done = FoundNgrams.model_validate_json(read_file(task.marker_path, task.encoded.scratch))
        is_whole = xxh3_of(task.slots_path) == done.slots_xxh3
    except (FileNotFoundError, ValidationError):
        return None
    return done if is_whole and (done.tokens_xxh3, done.table_xxh3) == (task.tokens_xxh3, task.table_xxh3) else None


def _find_ngrams(task: OverlapTask) -> FoundNgrams:
    table = _map(task.table_path, np.uint64)
    is_found = np.zeros(len(table), np.bool_)
    for hashes in _hash_part(task.encoded, "train", task.limit):
        is_found[_find(hashes, table)] = True
    slots = np.flatnonzero(is_found).astype(np.uint32)
    with write_file(task.slots_path) as file:
        file.write(slots.data)
    found = FoundNgrams(
        tokens_xxh3=task.tokens_xxh3,
        table_xxh3=task.table_xxh3,
        slots_xxh3=xxhash.xxh3_128_hexdigest(slots.data),
    )
    with write_file(task.marker_path) as file:
        file.write(found.model_dump_json().encode())
    return found


def _find(hashes: Hashes, table: Hashes) -> Slots:
    slots = np.empty(len(hashes), np.uint32)
    return slots[: find_hashes(hashes, table, slots)]


def _hash_part(task: EncodeTask, split: Split, limit: int) -> Iterator[Hashes]:
    """Yield the hashes up to `limit` of the n-grams of a partition's documents in one split, block by block.

    The next block overwrites an array that was yielded.
    """
    dtype = np.dtype(token_dtype(task.vocabulary.vocab_size))
    compile_ngram_kernels(dtype)
    tokens, starts = _map(task.tokens_path(split), dtype), _map(task.starts_path(split), np.int64)
    hashes = np.empty(_BLOCK_TOKENS, np.uint64)
    for begin in range(0, len(tokens), _BLOCK_TOKENS):
        first, end = max(0, begin - NGRAM_TOKENS + 1), min(begin + _BLOCK_TOKENS, len(tokens))
        document = int(np.searchsorted(starts, first))
        yield hashes[: hash_ngrams(tokens, starts, document, first, begin, end, np.uint64(limit), hashes)]


def _map(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the content of a file as a read-only array; an empty file cannot be mapped."""
    values = np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
    values.flags.writeable = False
    return values
