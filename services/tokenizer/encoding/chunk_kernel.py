"""The chunk-dictionary kernel: SentencePiece's ids, most of them copied from a table of chunks seen before.

Text is cut at hard borders (see `chunk_tables`). A chunk that was seen before costs a hash, a comparison of all its
bytes and a copy of its ids; an unseen one is encoded by BPE here and remembered. Ids never depend on what the table
holds, so it may be full, empty or shared.

Compiled by numba. Indices are unsigned on purpose: a signed one costs a branch for negative indices, and a loop that
has it is not vectorised (2.1 GB/s instead of 1.0 for the boundary pass).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.tokenizer.encoding.bpe_kernel import (
    CACHED_BYTES,
    are_in_a_piece,
    code_point_at,
    merge_chunk,
    merge_long_chunk,
)
from services.tokenizer.encoding.kernel_options import inlined, inner, kernel
from services.tokenizer.encoding.unaligned import load_word, store_word

BLOCK_BYTES = 1 << 16
"""Text whose boundaries are found before its chunks are looked up."""
SHORT_BYTES = 16
"""A chunk up to this long is its own key, in two words."""
PADDING_BYTES = 24
"""What a word that is loaded or stored at the end of a buffer may reach beyond it."""

_ENTRY_WORDS = 4  # key, key, size and count, ids
_HASH_SHIFT = np.uint64(20)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OTHER_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
# Masks for the first and the second word of a chunk of n bytes.
_FIRST_WORD = np.array([(1 << 8 * min(size, 8)) - 1 for size in range(SHORT_BYTES + 1)], np.uint64)
_SECOND_WORD = np.array([(1 << 8 * max(size - 8, 0)) - 1 for size in range(SHORT_BYTES + 1)], np.uint64)


class ChunkCache(NamedTuple):
    """Chunks and their ids. An entry is four words: the chunk (or its hash and its place in `long_chunks`), its size
    and the number of its ids, and the ids (or their place in `long_ids`). Size 0 is an empty slot.
    """

    entries: npt.NDArray[np.uint64]
    long_chunks: npt.NDArray[np.uint8]
    long_ids: npt.NDArray[Any]
    used: npt.NDArray[np.int64]
    """Entries, bytes of `long_chunks`, items of `long_ids`."""


@kernel
def encode_documents(text, begins, ends, bos_id, eos_id, tables, adds_prefix, cache, scratch, ids, offsets):
    """Write ids and offsets as `Encoder.encode` returns them; returns the number of ids, or `-n` when a chunk of n
    bytes does not fit into `scratch.long`: enlarge it and call again.

    `ids` has room for as many as there are bytes of text, 3 a document more, and PADDING_BYTES.
    """
    count = np.intp(0)
    for document in range(begins.size):
        offsets[document] = count
        if begins[document] == ends[document]:
            continue
        ids[count] = bos_id
        end = _copy_document(text[begins[document] : ends[document]], scratch.text)
        begin = np.intp(0) if adds_prefix else np.intp(1)
        count = _encode_text(begin, end, tables, cache, scratch, ids, count + 1)
        if count < 0:
            return count
        ids[count] = eos_id
        count += 1
    offsets[begins.size] = count
    return count


@kernel
def rehash(old, new):
    """Move the entries of one table into an empty one."""
    mask = np.uint64(new.size // _ENTRY_WORDS - 1)
    for begin in range(0, old.size, _ENTRY_WORDS):
        size = old[begin + 2] & np.uint64(0xFF)
        if size == 0:
            continue
        hashed = _hash_short(old[begin], old[begin + 1], size) if size <= SHORT_BYTES else old[begin]
        slot = (hashed >> _HASH_SHIFT) & mask
        while new[slot * np.uint64(_ENTRY_WORDS) + np.uint64(2)] != 0:
            slot = (slot + np.uint64(1)) & mask
        for word in range(_ENTRY_WORDS):
            new[slot * np.uint64(_ENTRY_WORDS) + np.uint64(word)] = old[begin + word]


@inlined
def _copy_document(document, text):
    """A space and the document, in which U+2581 becomes the space that SentencePiece takes it for; returns the end."""
    text[0] = 0x20
    target = text[1 : 1 + document.size]
    for i in range(document.size):
        target[i] = document[i]
    has_space_piece = np.uint8(0)
    for i in range(document.size - 2):
        has_space_piece |= np.uint8(
            (document[i] == np.uint8(0xE2)) & (document[i + 1] == np.uint8(0x96)) & (document[i + 2] == np.uint8(0x81))
        )
    end = 1 + document.size
    if has_space_piece == 0:
        return end
    write = read = 1
    while read < end:
        if read + 2 < end and text[read] == 0xE2 and text[read + 1] == 0x96 and text[read + 2] == 0x81:
            text[write] = 0x20
            read += 3
        else:
            text[write] = text[read]
            read += 1
        write += 1
    return write


@inner
def _encode_text(begin, end, tables, cache, scratch, ids, count):
    """Encode `scratch.text[begin:end]` to `ids[count:]`; returns the new count."""
    text, borders = scratch.text, scratch.borders
    chunk = begin
    block = begin
    while block < end:
        block_end = min(block + BLOCK_BYTES, end)
        num_borders = _find_borders(text[block:block_end], text[max(block - 1, 0)], tables.is_soft, borders)
        if block_end == end:
            borders[num_borders] = np.uint32(end - block)
            num_borders += np.uint32(1)
        first = np.uint32(1) if block == begin and borders[np.uint32(0)] == 0 else np.uint32(0)
        for index in range(first, num_borders):
            stop = block + np.intp(borders[np.uint32(index)])
            if stop - chunk <= SHORT_BYTES:
                count = _encode_short(chunk, stop, tables, cache, scratch, ids, count)
            else:
                count = _encode_long(chunk, stop, tables, cache, scratch, ids, count)
                if count < 0:
                    return count
            chunk = stop
        block = block_end
    return count


@inlined
def _find_borders(block, byte_before, is_soft, borders):
    """Positions in the block at which a chunk begins; returns their number. No branch depends on the text."""
    count = np.uint32(0)
    before = np.uint32(byte_before)
    for position in range(block.size):
        byte = np.uint32(block[position])
        borders[count] = np.uint32(position)
        count += np.uint32(1) - np.uint32(is_soft[(before << np.uint32(8)) | byte])
        before = byte
    return count


@inlined
def _encode_short(begin, end, tables, cache, scratch, ids, count):
    entries = cache.entries
    size = np.uint64(end - begin)
    first = load_word(scratch.text, begin) & _FIRST_WORD[size]
    second = load_word(scratch.text, begin + 8) & _SECOND_WORD[size]
    mask = np.uint64(entries.size // _ENTRY_WORDS - 1)
    slot = (_hash_short(first, second, size) >> _HASH_SHIFT) & mask
    while True:
        entry = slot * np.uint64(_ENTRY_WORDS)
        sizes = entries[entry + np.uint64(2)]
        if sizes == 0:
            encoded = merge_chunk(begin, end, tables, scratch, ids, count)
            if _has_room(cache, 0, encoded - count, ids.itemsize):
                _remember(entry, first, second, size, cache, ids, count, encoded)
            return encoded
        if entries[entry] == first and entries[entry + np.uint64(1)] == second and sizes & np.uint64(0xFF) == size:
            return _copy_ids(entry, cache, ids, count)
        slot = (slot + np.uint64(1)) & mask


@inner
def _encode_long(begin, end, tables, cache, scratch, ids, count):
    """A chunk that has no hard border by its bytes: cut it by its characters, where it has any beyond ASCII."""
    text = scratch.text
    chunk = begin
    at = begin
    before = np.int64(0)
    while at < end:
        code_point, size = code_point_at(text, at)
        is_exact = code_point < 0x80 and before < 0x80  # the table of bytes has said that they belong together
        if at > chunk and not is_exact and not are_in_a_piece(before, code_point, tables):
            count = _encode_chunk(chunk, at, tables, cache, scratch, ids, count)
            if count < 0:
                return count
            chunk = at
        before = code_point
        at += size
    return _encode_chunk(chunk, end, tables, cache, scratch, ids, count)


@inner
def _encode_chunk(begin, end, tables, cache, scratch, ids, count):
    if end - begin <= SHORT_BYTES:
        return _encode_short(begin, end, tables, cache, scratch, ids, count)
    if end - begin > CACHED_BYTES:
        return merge_long_chunk(begin, end, tables, scratch, ids, count)
    entries = cache.entries
    size = np.uint64(end - begin)
    hashed = _hash_long(scratch.text, begin, end - begin)
    mask = np.uint64(entries.size // _ENTRY_WORDS - 1)
    slot = (hashed >> _HASH_SHIFT) & mask
    while True:
        entry = slot * np.uint64(_ENTRY_WORDS)
        sizes = entries[entry + np.uint64(2)]
        if sizes == 0:
            encoded = merge_chunk(begin, end, tables, scratch, ids, count)
            if _has_room(cache, end - begin, encoded - count, ids.itemsize):
                place = cache.used[1]
                for index in range(end - begin):
                    cache.long_chunks[place + index] = scratch.text[begin + index]
                cache.used[1] += end - begin
                _remember(entry, hashed, np.uint64(place), size, cache, ids, count, encoded)
            return encoded
        if entries[entry] == hashed and sizes & np.uint64(0xFF) == size:
            place = np.intp(entries[entry + np.uint64(1)])
            if _are_equal(scratch.text[begin:end], cache.long_chunks[place : place + end - begin]):
                return _copy_ids(entry, cache, ids, count)
        slot = (slot + np.uint64(1)) & mask


@inlined
def _has_room(cache, chunk_bytes, num_ids, id_bytes):
    """What is three quarters full takes no more; the next batch finds it enlarged or emptied."""
    used = cache.used
    num_apart = num_ids if num_ids * id_bytes > 8 else 0
    return (
        used[0] * 4 < cache.entries.size // _ENTRY_WORDS * 3
        and used[1] + chunk_bytes <= cache.long_chunks.size
        and used[2] + num_apart <= cache.long_ids.size
    )


@inner
def _remember(entry, first, second, size, cache, ids, begin, end):
    num_ids = end - begin
    cache.entries[entry] = first
    cache.entries[entry + np.uint64(1)] = second
    cache.entries[entry + np.uint64(2)] = size | (np.uint64(num_ids) << np.uint64(8))
    if num_ids * ids.itemsize <= 8:
        cache.entries[entry + np.uint64(3)] = load_word(ids, begin)
    else:
        place = cache.used[2]
        for index in range(num_ids):
            cache.long_ids[place + index] = ids[begin + index]
        cache.used[2] += num_ids
        cache.entries[entry + np.uint64(3)] = np.uint64(place)
    cache.used[0] += 1


@inlined
def _copy_ids(entry, cache, ids, count):
    num_ids = np.intp(cache.entries[entry + np.uint64(2)] >> np.uint64(8))
    if num_ids * ids.itemsize <= 8:
        store_word(ids, count, cache.entries[entry + np.uint64(3)])
    else:
        place = np.intp(cache.entries[entry + np.uint64(3)])
        for index in range(num_ids):
            ids[count + index] = cache.long_ids[place + index]
    return count + num_ids


@inlined
def _hash_short(first, second, size):
    hashed = (first ^ (second * _OTHER_MULTIPLIER) ^ size) * _MULTIPLIER
    return (hashed ^ (hashed >> np.uint64(32))) * _OTHER_MULTIPLIER


@inner
def _hash_long(text, begin, size):
    hashed = np.uint64(size) * _OTHER_MULTIPLIER
    for at in range(begin, begin + size - 7, 8):
        hashed = (hashed ^ load_word(text, at)) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    rest = size & 7
    hashed = (hashed ^ (load_word(text, begin + size - rest) & _FIRST_WORD[rest])) * _MULTIPLIER
    return (hashed ^ (hashed >> np.uint64(32))) * _OTHER_MULTIPLIER


@inner
def _are_equal(left, right):
    index = 0
    while index < left.size and left[index] == right[index]:
        index += 1
    return index == left.size
