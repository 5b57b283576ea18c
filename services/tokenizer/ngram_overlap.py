"""Counts the n-grams of the validation split that are in the training split, too.

Equal documents are in one split, but a license or a quotation can be in documents of both. So tasks look up the n-grams
of each partition's training documents in the set of the validation split's n-grams, whose size is bounded.

An n-gram is NGRAM_TOKENS tokens in a row of one document, without BOS and EOS. Its hash is a polynomial modulo 2**64
whose coefficients are its tokens, mixed. The hashes of all n-grams of a block come from one prefix sum: its term i is a
mixed token times the i-th power of an odd number, and the sum of a window, times a power of the number's inverse, is
the polynomial. Two n-grams have the same hash with a probability of about 2**-64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.artifacts.corpus import Split, Vocabulary
from services.common.launch.launcher import Launcher
from services.common.process.progress import show_progress
from services.tokenizer.encode_task import EncodedPartitions, starts_path, tokens_path
from services.tokenizer.encoding.encoder import token_dtype
from services.tokenizer.tasks import NUMBERS_PER_FOLDER, TaskSequence, map_array, map_largest_first, write_file

NGRAM_TOKENS = 13
"""GPT-3 compares training text with benchmarks by n-grams of at most 13 words (arXiv 2005.14165, appendix C)."""
MAX_NGRAMS = 2**18
"""Most n-grams of the validation split that are looked up, in a set of 14 MiB. Of a larger split they are sampled by
their hashes: a share of 13 % then has a standard error of 0.07 %, or more where n-grams are frequent."""
_LARGEST_HASH = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF_WORD = np.uint64(32)
_FILTER_ITEMS = 16
"""Items of the filter for each hash of a set; one in so many hashes that are not in the set passes it."""
_BLOCK_TOKENS = 2**15

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NgramOverlap:
    """Numbers of n-grams of the validation split; one that is there twice counts twice."""

    ngrams: int = 0
    ngrams_in_train: int = 0


@dataclass(frozen=True)
class NgramTask:
    """The input of `hash_validation` and `find_ngrams`, which is sent to a worker process."""

    folder: Path
    """Folder of the encoded partitions."""
    partitions: range
    vocabulary: Vocabulary
    limit: int
    """Largest hash that counts."""

    @property
    def set_path(self) -> Path:
        """File of the hashes of the validation split's n-grams, in rising order."""
        return self.folder / "validation.ngrams"

    def split(self, size: int) -> TaskSequence[NgramTask]:
        """Return tasks of `size` partitions each."""
        firsts = self.partitions[::size]
        return TaskSequence(len(firsts), lambda at: replace(self, partitions=self.partitions[at * size :][:size]))


def count_overlap(
    folder: Path,
    vocabulary: Vocabulary,
    encoded: EncodedPartitions,
    launcher: Launcher,
    num_workers: int,
    max_ngrams: int = MAX_NGRAMS,
) -> list[NgramOverlap]:
    """Return the counts of each source's validation documents. `folder` has the encoded partitions."""
    num_sources = int(encoded.sources.max(initial=-1)) + 1
    documents, tokens = encoded.documents["validation"], encoded.tokens("validation")
    num_tokens = int(tokens.sum() - vocabulary.num_special_tokens * documents.sum())
    if num_tokens == 0:
        return [NgramOverlap()] * num_sources
    limit = _LARGEST_HASH * min(num_tokens, max_ngrams) // num_tokens
    everything = NgramTask(folder, range(len(encoded.sources)), vocabulary, limit)
    own: list[list[Hashes]] = [[np.empty(0, np.uint64)] for _ in range(num_sources)]
    hash_tasks = everything.split(NUMBERS_PER_FOLDER)
    for _, hashes in launcher.map_tasks(hash_validation, hash_tasks, num_workers):
        for partition, each in hashes.items():
            own[encoded.sources[partition]].append(each)
    hashes_of_sources = [np.concatenate(each) for each in own]
    held_out = NgramSet(np.unique(np.concatenate(hashes_of_sources)))
    with write_file(everything.set_path) as file:
        file.write(held_out.hashes.data)
    is_in_train = np.zeros(len(held_out.hashes), np.bool_)
    sizes = encoded.tokens("train")
    with show_progress("overlap", int(sizes.sum()), "tokens") as progress:
        done_tokens = 0
        for index, found in map_largest_first(launcher, find_ngrams, everything.split(1), sizes, num_workers):
            is_in_train[found] = True
            done_tokens += int(sizes[index])
            progress.advance_to(done_tokens)
    ngrams_of_sources = map(held_out.find, hashes_of_sources)
    return [NgramOverlap(len(ngrams), int(is_in_train[ngrams].sum())) for ngrams in ngrams_of_sources]


def hash_validation(task: NgramTask) -> dict[int, Hashes]:
    """Return the hashes up to `task.limit` of the n-grams of each partition's validation documents."""
    empty = np.empty(0, np.uint64)
    return {each: np.concatenate([empty, *_hash_blocks(task, each, "validation")]) for each in task.partitions}


def find_ngrams(task: NgramTask) -> Indices:
    """Return the indices in the set of the n-grams of the partitions' training documents, rising."""
    held_out = NgramSet(map_array(task.set_path, np.uint64))
    is_found = np.zeros(len(held_out.hashes), np.bool_)
    for partition in task.partitions:
        for hashes in _hash_blocks(task, partition, "train"):
            is_found[held_out.find(hashes)] = True
    return np.flatnonzero(is_found)


def _hash_blocks(task: NgramTask, partition: int, split: Split) -> Iterator[Hashes]:
    tokens = map_array(tokens_path(task.folder, partition, split), token_dtype(task.vocabulary.vocab_size))
    starts = map_array(starts_path(task.folder, partition, split), np.int64)
    hasher = NgramHasher(task.vocabulary, _BLOCK_TOKENS)
    for begin in range(0, len(tokens), _BLOCK_TOKENS):
        yield hasher.hash_block(tokens, starts, begin, min(begin + _BLOCK_TOKENS, len(tokens)), task.limit)


class NgramHasher:
    """Hashes the n-grams of token ids of a vocabulary, in blocks of up to `block_tokens`."""

    def __init__(self, vocabulary: Vocabulary, block_tokens: int) -> None:
        self._num_special_tokens = vocabulary.num_special_tokens
        self._mixed_tokens = _mix(np.arange(1, vocabulary.vocab_size + 1, dtype=np.uint64) * np.uint64(_BASE))
        self._powers = _powers(_BASE, block_tokens + NGRAM_TOKENS)
        self._inverse_powers = _powers(pow(_BASE, -1, 2**64), block_tokens + NGRAM_TOKENS)

    def hash_block(
        self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], begin: int, end: int, limit: int
    ) -> Hashes:
        """Return the hashes up to `limit` of the n-grams that end in [begin, end).

        Documents begin at `starts`, with BOS if there is one, and each ends with EOS before the next one.
        """
        first = max(0, begin - NGRAM_TOKENS + 1)
        count = end - first
        if count < NGRAM_TOKENS:
            return np.empty(0, np.uint64)
        sums = np.zeros(count + 1, np.uint64)
        np.cumsum(self._mixed_tokens[tokens[first:end]] * self._powers[:count], out=sums[1:])
        hashes = _mix((sums[NGRAM_TOKENS:] - sums[:-NGRAM_TOKENS]) * self._inverse_powers[: count - NGRAM_TOKENS + 1])
        is_wanted = hashes <= np.uint64(limit)
        borders = starts[slice(*np.searchsorted(starts, [first, end + 1]))]
        if end == len(tokens):
            borders = np.append(borders, end)
        # An n-gram that begins at most NGRAM_TOKENS before a border holds the EOS before it or the BOS behind it.
        crossing = (borders[:, None] - first + np.arange(-NGRAM_TOKENS, self._num_special_tokens - 1)).ravel()
        is_wanted[crossing[(crossing >= 0) & (crossing < len(hashes))]] = False
        return hashes[is_wanted]


class NgramSet:
    """A set of hashes. The index of a hash among the sorted ones stands for its n-gram."""

    def __init__(self, hashes: Hashes) -> None:
        """Take different hashes in rising order."""
        self.hashes = hashes
        # Most hashes that are not in the set have low bits that no hash of the set has.
        self._is_possible = np.zeros(1 << (_FILTER_ITEMS * len(hashes)).bit_length(), np.bool_)
        self._low_bits = np.uint64(len(self._is_possible) - 1)
        self._is_possible[self._low(hashes)] = True

    def find(self, hashes: Hashes) -> Indices:
        """Return the indices of the hashes that are in the set."""
        possible = np.sort(hashes[np.flatnonzero(self._is_possible[self._low(hashes)])])  # sorted, for the caches
        indices = np.searchsorted(self.hashes, possible)
        indices[indices == len(self.hashes)] = 0
        return indices[self.hashes[indices] == possible]

    def _low(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        # A signed index: numpy converts an unsigned one first, which takes as long as the rest of `find`.
        return (hashes & self._low_bits).view(np.int64)


def _mix(values: Hashes) -> Hashes:
    return np.asarray((values ^ (values >> _HALF_WORD)) * _MULTIPLIER)


@cache
def _powers(base: int, count: int) -> Hashes:
    """Return base**0 to base**(count - 1) modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
