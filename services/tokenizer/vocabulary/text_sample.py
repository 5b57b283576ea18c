"""Samples the text that a vocabulary is trained on: documents of all sources, by weight, chosen by hashes.

A document has a key in each pass over its source, a hash, and the sample is the documents with the smallest keys: the
same ones for any order of the sources, for other file names, and for partitions of another size. Where a source is read
in part, names count among files of one size.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.recipe.schema import Corpus
from services.tokenizer.document_hashes import are_for_validation, sampling_keys, take_new
from services.tokenizer.sources.bad_rows import BadRows, add_up, require_few_bad_rows
from services.tokenizer.sources.documents import cut_file, read_documents
from services.tokenizer.sources.input_files import FileListing, FileRange, InputFile
from services.tokenizer.text_batch import TextBatch
from services.tokenizer.vocabulary.training import take_first

logger = logging.getLogger(__name__)

READ_FACTOR = 8
"""Input bytes that are read for each byte of the sample. An eighth of the input must be text of the training split for
the sample to be full; of modules that are read for their docstrings, a quarter is."""
_RANGES_PER_SAMPLE = 256
_MIN_RANGE_BYTES = 4_096
_SPREAD = 32
"""Bytes of the files that are opened, for each byte that is read. A large source has large files, and a file often has
one period or one subject, so that text of few files would be no sample."""

Item = TypeVar("Item")


def sample_text(corpus: Corpus, listings: Sequence[FileListing], max_bytes: int) -> list[bytes]:
    """Return documents of the training split with `max_bytes` of text, or all of them when there are fewer.

    `listings` are the files of each source, which has the share of the text that it has of the training split. Sources
    of more than `READ_FACTOR * max_bytes` in total are read in part. With `corpus.duplicates = "drop"` the first
    document that is read of several equal ones stands for all of them.
    """
    shares = _shares_to_read(corpus, listings, READ_FACTOR * max_bytes)
    range_bytes = max(_MIN_RANGE_BYTES, max_bytes // _RANGES_PER_SAMPLE)
    smallest = _SmallestKeys(max_bytes)
    bad_rows = BadRows(corpus.bad_rows)
    seen: set[bytes] = set()
    for source, listing, share in zip(corpus.sources, listings, shares, strict=True):
        file_ranges, share_read = _choose_file_ranges(listing, share, range_bytes, corpus.max_document_bytes)
        for batch in read_documents(file_ranges, corpus.invalid_utf8, corpus.max_document_bytes, bad_rows):
            wanted = batch.select(batch.sizes >= max(1, corpus.min_document_bytes))
            if corpus.duplicates == "drop":
                wanted = take_new(wanted, seen)
            wanted = wanted.select(~are_for_validation(wanted, corpus.validation_fraction))
            for pass_number in range(math.ceil(source.weight)):
                # Where a tenth of a source is read, each of its documents stands for ten.
                smallest.add(wanted, share_read * sampling_keys(wanted, source.weight, pass_number))
    bad_files = add_up(bad_rows.files())
    require_few_bad_rows(bad_files, sum(file.num_rows for file in bad_files), corpus.max_bad_rows)
    return smallest.documents()


class _SmallestKeys:
    """Keeps the documents with the smallest keys below 1, and as many of them as have `max_bytes` of text."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._heap: list[tuple[float, bytes]] = []
        """Negated keys with their documents; the largest key comes first."""
        self._bytes = 0

    def add(self, batch: TextBatch, keys: npt.NDArray[np.float64]) -> None:
        limit = -self._heap[0][0] if self._bytes >= self._max_bytes else 1.0
        is_small = keys < limit
        for key, document in zip(keys[is_small].tolist(), batch.select(is_small).views(), strict=True):
            heapq.heappush(self._heap, (-key, bytes(document)))
            self._bytes += len(document)
            while self._bytes - len(self._heap[0][1]) >= self._max_bytes:
                self._bytes -= len(heapq.heappop(self._heap)[1])

    def documents(self) -> list[bytes]:
        """Return the documents in the order of their keys. The last one is cut between two characters."""
        return list(take_first((document for _, document in sorted(self._heap, reverse=True)), self._max_bytes))


def _shares_to_read(corpus: Corpus, listings: Sequence[FileListing], budget: int) -> list[Fraction]:
    """Return the share of each source that is read, by its weight, so that all of them have at most `budget` bytes.

    The numbers are exact, because a sum of floats depends on the order of the sources.
    """
    sizes = [max(1, int(listing.sizes.sum())) for listing in listings]
    weights = [Fraction(source.weight) for source in corpus.sources]
    shares = [Fraction(1)] * len(listings)
    partial, left = set(range(len(listings))), Fraction(budget)
    while partial:
        rate = left / sum(weights[number] * sizes[number] for number in partial)
        whole = {number for number in partial if rate * weights[number] >= 1}
        if not whole:
            for number in partial:
                shares[number] = rate * weights[number]
            logger.info("the vocabulary's text is sampled from %s of %s input bytes", f"{budget:,}", f"{sum(sizes):,}")
            break
        left -= sum(sizes[number] for number in whole)
        partial -= whole
    return shares


def _choose_file_ranges(
    listing: FileListing, share: Fraction, range_bytes: int, max_document_bytes: int
) -> tuple[Iterable[FileRange], float]:
    """Choose file ranges with about `share` of the bytes of a source's files, and return them with their share.

    Hashes of sizes and positions choose first files and then file ranges in them, whatever `corpus.split_bytes` is.
    """
    if share == 1:
        return (each for file in listing for each in cut_file(file, max(1, file.bytes))), 1.0
    all_bytes = int(listing.sizes.sum())
    opened = _take(_in_order_of_keys(listing), lambda file: file.bytes, _SPREAD * share * all_bytes)
    opened_bytes = sum(file.bytes for file in opened)
    file_ranges = [each for file in opened for each in cut_file(file, range_bytes)]
    cut_bytes = sum(each.bytes for each in file_ranges)
    wanted_bytes = share * all_bytes / opened_bytes * cut_bytes
    file_ranges.sort(key=lambda each: (_hash(f"{each.file.bytes} {each.begin} {each.end}"), _hash(each.file.name)))
    chosen = _take(file_ranges, lambda each: each.bytes, wanted_bytes)
    chosen_bytes = sum(each.bytes for each in chosen)
    share_read = Fraction(opened_bytes, all_bytes) * Fraction(chosen_bytes, max(1, cut_bytes))
    return chosen, float(share_read)


def _take(items: Iterable[Item], size: Callable[[Item], int], wanted: Fraction) -> list[Item]:
    """Return the first items that have `wanted` bytes together; at least one item, if there is one."""
    taken: list[Item] = []
    for item in items:
        taken.append(item)
        wanted -= size(item)
        if wanted <= 0:
            break
    return taken


def _in_order_of_keys(listing: FileListing) -> Iterator[InputFile]:
    """Yield files in an order that spreads them evenly. Names count among files of one size alone."""
    by_size = np.fromiter((_hash(f"{size}") for size in listing.sizes.tolist()), np.uint64, len(listing))
    by_name = np.fromiter((_hash(file.name) for file in listing), np.uint64, len(listing))
    return (listing[int(number)] for number in np.lexsort((by_name, by_size)))


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
