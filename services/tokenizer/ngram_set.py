"""Hashes of the n-grams of tokens in documents, and a set of them.

An n-gram is NGRAM_TOKENS tokens in a row of one document, without BOS and EOS. Its hash is a polynomial modulo 2**64
whose coefficients are its tokens, mixed. The hashes of all n-grams of a block come from one prefix sum: its term i is a
mixed token times the i-th power of an odd number, and the sum of a window, times a power of the number's inverse, is
the polynomial. Two n-grams have the same hash with a probability of about 2**-64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

NGRAM_TOKENS = 13
"""GPT-3 compares training text with benchmarks by n-grams of at most 13 words (arXiv 2005.14165, appendix C)."""
LARGEST_HASH = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF_WORD = np.uint64(32)
_FILTER_ITEMS = 16
"""Items of the filter for each hash of a set; one in so many hashes that are not in the set passes it."""

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]


class NgramHasher:
    """Hashes the n-grams of token ids below `vocab_size`, in blocks of up to `block_tokens`."""

    def __init__(self, vocab_size: int, block_tokens: int) -> None:
        self._mixed_tokens = _mix(np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_BASE))
        self._powers = _powers(_BASE, block_tokens + NGRAM_TOKENS)
        self._inverse_powers = _powers(pow(_BASE, -1, 2**64), block_tokens + NGRAM_TOKENS)

    def hash_block(
        self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64], begin: int, end: int, limit: int
    ) -> Hashes:
        """Return the hashes up to `limit` of the n-grams that end in [begin, end).

        Documents begin at `starts` with BOS, and each ends with EOS before the next one.
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
        crossing = (borders[:, None] - first + np.arange(-NGRAM_TOKENS, 1)).ravel()
        is_wanted[crossing[(crossing >= 0) & (crossing < len(hashes))]] = False
        return hashes[is_wanted]


class NgramSet:
    """A set of hashes. The index of a hash among the sorted ones stands for its n-gram."""

    def __init__(self, hashes: Hashes) -> None:
        """`hashes` are different, and in rising order."""
        self.hashes = hashes
        # Most hashes that are not in the set have low bits that no hash of the set has.
        self._is_possible = np.zeros(1 << (_FILTER_ITEMS * len(hashes)).bit_length(), np.bool_)
        self._low_bits = np.uint64(len(self._is_possible) - 1)
        self._is_possible[self._low(hashes)] = True
        # The high bits of a hash are the number of its bucket, and a bucket is a range of indices.
        largest = int(hashes[-1]) if len(hashes) else 0
        self._shift = np.uint64(max(0, largest.bit_length() - (2 * len(hashes)).bit_length()))
        buckets = np.arange((largest >> int(self._shift)) + 1, dtype=np.uint64)
        self._begins = np.append(np.searchsorted(hashes, buckets << self._shift), len(hashes)).astype(np.int32)

    def find(self, hashes: Hashes) -> Indices:
        """Return the indices of the hashes that are in the set, in any order."""
        left = hashes[np.flatnonzero(self._is_possible[self._low(hashes)])]
        left = left[left <= self.hashes[-1:]] if len(self.hashes) else left[:0]
        bucket = (left >> self._shift).view(np.int64)
        index, end = self._begins[bucket], self._begins[bucket + 1]
        found = [index[:0]]
        is_left = index < end
        while is_left.any():
            left, index, end = left[is_left], index[is_left], end[is_left]
            is_found = self.hashes[index] == left
            found.append(index[is_found])
            index = index + 1
            is_left = ~is_found & (index < end)
        return np.concatenate(found)

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
