"""Counts the n-grams of the validation split that are in the training split, too.

A loss on text that a model has trained on is no loss on new text. Equal documents are in one split, but a license or a
quotation can be in documents of both. So tasks on the workers look up the n-grams of each partition's training
documents in the set of the validation split's n-grams, and the counts go into the manifest.

Every token of both splits is read once, by tasks. A task over training documents writes the indices of the n-grams that
it found, at most four bytes for a token, and a marker: when a command is repeated, a task whose marker fits its file is
not run again. Each of these tasks loads the set, whose size is bounded. A task over validation documents reads the
partitions of a folder of scratch, and returns the hashes that are candidates for the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from services.common.artifacts.corpus import Split
from services.common.artifacts.manifest import ManifestModel
from services.common.input.files import read_file
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encode_task import EncodedPartition, EncodeTask
from services.tokenizer.encoded_partitions import EncodedPartitions
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.mapped_array import map_array
from services.tokenizer.ngram_set import LARGEST_HASH, Hashes, NgramHasher, NgramSet
from services.tokenizer.scratch_tree import NUMBERS_PER_FOLDER
from services.tokenizer.task_marker import read_marker, write_marker
from services.tokenizer.task_sequence import TaskSequence, map_largest_first

MAX_NGRAMS = 2**18
"""Most n-grams of the validation split that are looked up, which bounds their set to 14 MiB. A larger split is sampled
by the n-grams' hashes, and so is the training split, so that most of its n-grams are hashed and not looked up. With so
many n-grams that occur once, a share of 13 % has a standard error of 0.07 %; frequent n-grams make it larger."""
_BLOCK_TOKENS = 2**15


@dataclass(frozen=True)
class NgramOverlap:
    """Numbers of n-grams of the validation split; one that is there twice counts twice."""

    ngrams: int = 0
    ngrams_in_train: int = 0


@dataclass(frozen=True)
class ValidationTask:
    """The input of `hash_validation`, which is sent to a worker process."""

    encoded: tuple[EncodeTask, ...]
    """The tasks that encoded the partitions."""
    limit: int
    """Largest hash that is returned."""


@dataclass(frozen=True)
class OverlapTask:
    """The input of `find_ngrams`, which is sent to a worker process."""

    encoded: EncodeTask
    """The task that encoded the partition."""
    set_path: Path
    """File of the hashes of the validation split's n-grams, in rising order."""
    set_xxh3: str
    limit: int
    """Largest hash that an n-gram of the set may have."""

    @property
    def found_path(self) -> Path:
        """File of the indices of the n-grams that were found."""
        return self.encoded.marker_path.with_suffix(".ngrams")

    @property
    def marker_path(self) -> Path:
        return self.encoded.marker_path.with_suffix(".ngrams.json")


class FoundNgrams(ManifestModel):
    """The result of a task. Its JSON is the task's marker."""

    tokens_xxh3: str
    set_xxh3: str
    found_xxh3: str


def count_overlap(
    tasks: Sequence[EncodeTask],
    encoded: EncodedPartitions,
    launcher: Launcher,
    num_workers: int,
    max_ngrams: int = MAX_NGRAMS,
) -> list[NgramOverlap]:
    """Return the counts of each source's validation documents."""
    num_sources = int(encoded.sources.max(initial=-1)) + 1
    num_tokens = encoded.totals("validation").document_tokens
    if num_tokens == 0:
        return [NgramOverlap()] * num_sources
    limit = LARGEST_HASH * min(num_tokens, max_ngrams) // num_tokens
    own = _hash_sources(tasks, encoded, launcher, num_workers, limit)
    held_out = NgramSet(np.unique(np.concatenate(own)))
    set_path = tasks[0].scratch / "validation.ngrams"
    with write_file(set_path) as file:
        file.write(held_out.hashes.data)
    set_xxh3 = xxhash.xxh3_128_hexdigest(held_out.hashes.data)
    overlap_tasks = TaskSequence(len(tasks), lambda index: OverlapTask(tasks[index], set_path, set_xxh3, limit))
    is_in_train = np.zeros(len(held_out.hashes), np.bool_)
    sizes = encoded.tokens("train")
    with show_progress("overlap", int(sizes.sum()), "tokens") as progress:
        done_tokens = 0
        for index, _ in map_largest_first(launcher, find_ngrams, overlap_tasks, sizes, num_workers):
            is_in_train[np.fromfile(overlap_tasks[index].found_path, np.uint32)] = True
            done_tokens += int(sizes[index])
            progress.advance_to(done_tokens)
    counts = []
    for hashes in own:
        ngrams = held_out.find(hashes)
        counts.append(NgramOverlap(len(ngrams), int(is_in_train[ngrams].sum())))
    return counts


def _hash_sources(
    tasks: Sequence[EncodeTask], encoded: EncodedPartitions, launcher: Launcher, num_workers: int, limit: int
) -> list[Hashes]:
    """Return the hashes up to `limit` of each source's validation documents; one that is there twice is twice."""
    begins = range(0, len(tasks), NUMBERS_PER_FOLDER)
    folders = TaskSequence(
        len(begins), lambda folder: ValidationTask(tuple(tasks[begins[folder] :][:NUMBERS_PER_FOLDER]), limit)
    )
    own: dict[int, list[Hashes]] = {source: [] for source in range(int(encoded.sources.max(initial=-1)) + 1)}
    for folder, hashes in launcher.map_tasks(hash_validation, folders, num_workers):
        for index, each in enumerate(hashes, start=begins[folder]):
            own[int(encoded.sources[index])].append(each)
    return [np.concatenate([np.empty(0, np.uint64), *hashes]) for hashes in own.values()]


def hash_validation(task: ValidationTask) -> list[Hashes]:
    """Return the hashes up to `task.limit` of the n-grams of every partition's validation documents."""
    empty = np.empty(0, np.uint64)
    return [np.concatenate([empty, *_hash_blocks(each, "validation", task.limit)]) for each in task.encoded]


def find_ngrams(task: OverlapTask) -> FoundNgrams:
    """Run the task, unless its file is complete. Two processes that run the same task write the same bytes."""
    return _read_marker(task) or _find_ngrams(task)


def _read_marker(task: OverlapTask) -> FoundNgrams | None:
    """Return the result of a task that was run before, or None when its file is incomplete or of other input."""
    done = read_marker(
        task.marker_path, task.encoded.scratch, FoundNgrams, lambda result: {task.found_path: result.found_xxh3}
    )
    is_own = done and (done.tokens_xxh3, done.set_xxh3) == (_tokens_xxh3(task.encoded), task.set_xxh3)
    return done if is_own else None


def _tokens_xxh3(task: EncodeTask) -> str:
    """Return the checksum of the partition's training tokens, which its encode task has left in its marker."""
    marker = EncodedPartition.model_validate_json(read_file(task.marker_path, task.scratch))
    return marker.parts["train"].tokens_xxh3


def _find_ngrams(task: OverlapTask) -> FoundNgrams:
    held_out = NgramSet(map_array(task.set_path, np.uint64))
    is_found = np.zeros(len(held_out.hashes), np.bool_)
    for hashes in _hash_blocks(task.encoded, "train", task.limit):
        is_found[held_out.find(hashes)] = True
    indices = np.flatnonzero(is_found).astype(np.uint32)
    with write_file(task.found_path) as file:
        file.write(indices.data)
    found = FoundNgrams(
        tokens_xxh3=_tokens_xxh3(task.encoded),
        set_xxh3=task.set_xxh3,
        found_xxh3=xxhash.xxh3_128_hexdigest(indices.data),
    )
    write_marker(task.marker_path, found)
    return found


def _hash_blocks(task: EncodeTask, split: Split, limit: int) -> Iterator[Hashes]:
    vocab_size = task.vocabulary.vocab_size
    tokens = map_array(task.tokens_path(split), token_dtype(vocab_size))
    starts = map_array(task.starts_path(split), np.int64)
    hasher = NgramHasher(vocab_size, _BLOCK_TOKENS)
    for begin in range(0, len(tokens), _BLOCK_TOKENS):
        yield hasher.hash_block(tokens, starts, begin, min(begin + _BLOCK_TOKENS, len(tokens)), limit)
