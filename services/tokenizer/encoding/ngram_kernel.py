"""Hashes of the n-grams of tokens in documents, and a hash table that finds them again.

An n-gram is NGRAM_TOKENS tokens in a row of one document, without BOS and EOS. Its hash is a polynomial in mixed tokens
modulo 2**64, which rolls: the next n-gram's hash takes two multiplications, whatever NGRAM_TOKENS is. Two n-grams have
the same hash with a probability of 2**-63.

The table is an array of hashes with linear probing, whose size is a power of two. A slot of 0 is empty, and no hash is
0. Numba compiles this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.tokenizer.encoding.compiled_kernels import compile_once
from services.tokenizer.encoding.kernel_options import inlined, kernel

NGRAM_TOKENS = 13
"""GPT-3 compares training text with benchmarks by n-grams of at most 13 words (arXiv 2005.14165, appendix C)."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OTHER_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
_HIGHEST_POWER = np.uint64(pow(0x9E3779B97F4A7C15, NGRAM_TOKENS - 1, 2**64))
_HALF_WORD = np.uint64(32)
_SLOT_SHIFT = np.uint64(20)
_ONE = np.uint64(1)


@kernel
def hash_ngrams(tokens, starts, document, first, begin, end, limit, hashes):
    """Write the hashes up to `limit` of the n-grams that end in [begin, end), and return their number.

    `first` is `begin - NGRAM_TOKENS + 1`, or 0 at the begin of the tokens. `document` is the first index of `starts`
    whose document begins there or later.
    """
    count = 0
    length = 0
    hashed = np.uint64(0)
    next_start = starts[document] if document < starts.size else tokens.size
    for position in range(first, end):
        is_bos = position == next_start
        if is_bos:
            document += 1
            next_start = starts[document] if document < starts.size else tokens.size
        if is_bos or position + 1 == next_start:
            length = 0
            hashed = np.uint64(0)
            continue
        if length >= NGRAM_TOKENS:
            hashed -= _mix(tokens[position - NGRAM_TOKENS]) * _HIGHEST_POWER
        hashed = hashed * _MULTIPLIER + _mix(tokens[position])
        length += 1
        if length >= NGRAM_TOKENS and position >= begin:
            found = ((hashed ^ (hashed >> _HALF_WORD)) * _OTHER_MULTIPLIER) | _ONE
            if found <= limit:
                hashes[count] = found
                count += 1
    return count


@kernel
def add_hashes(hashes, table):
    """Add hashes to the table, which must have room for them."""
    mask = np.uint64(table.size - 1)
    for i in range(hashes.size):
        slot = _first_slot(hashes[i], mask)
        while table[slot] != 0 and table[slot] != hashes[i]:
            slot = (slot + _ONE) & mask
        table[slot] = hashes[i]


@kernel
def find_hashes(hashes, table, slots):
    """Write the slots of the hashes that are in the table, and return their number."""
    mask = np.uint64(table.size - 1)
    count = 0
    for i in range(hashes.size):
        slot = _first_slot(hashes[i], mask)
        while table[slot] != 0 and table[slot] != hashes[i]:
            slot = (slot + _ONE) & mask
        if table[slot] != 0:
            slots[count] = slot
            count += 1
    return count


@inlined
def _mix(token):
    mixed = (np.uint64(token) + _ONE) * _OTHER_MULTIPLIER
    return (mixed ^ (mixed >> _HALF_WORD)) * _MULTIPLIER


@inlined
def _first_slot(hashed, mask):
    return ((hashed * _MULTIPLIER) >> _SLOT_SHIFT) & mask


def compile_ngram_kernels(dtype: np.dtype[Any]) -> None:
    """Compile these kernels for tokens of a type, unless numba's folder on this machine has them."""
    compile_once(f"ngrams-{dtype.name}", lambda: _load_kernels(dtype))


def _load_kernels(dtype: np.dtype[Any]) -> None:
    tokens, starts, table = np.zeros(0, dtype), np.zeros(0, np.int64), np.zeros(1, np.uint64)
    hashes = np.zeros(0, np.uint64)
    add_hashes(hashes, table)
    for array in (tokens, starts, table):  # as mapped files are
        array.flags.writeable = False
    hash_ngrams(tokens, starts, 0, 0, 0, 0, np.uint64(0), hashes)
    find_hashes(hashes, table, np.zeros(0, np.uint32))
