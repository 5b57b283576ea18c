"""BPE of one chunk of text, with SentencePiece's order of merges: the highest score first, the leftmost of equals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.tokenizer.encoding.kernel_options import inlined, inner

CACHED_BYTES = 255
"""The largest chunk that `merge_chunk` takes, and that is remembered once it is encoded."""

_MERGED_AWAY = np.int32(-2)  # -1 is a character without a piece
_NO_MERGE = np.int64(0x7FFFFFFFFFFFFFFF)


class LongChunk(NamedTuple):
    """The symbols of a chunk of more than CACHED_BYTES: a list with links both ways, and the merges to come."""

    symbols: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]
    following: npt.NDArray[np.int32]
    preceding: npt.NDArray[np.int32]
    heap: npt.NDArray[np.int64]


class Scratch(NamedTuple):
    text: npt.NDArray[np.uint8]
    """One document: a space, its bytes, PADDING_BYTES."""
    borders: npt.NDArray[np.uint32]
    """[BLOCK_BYTES + 1]"""
    symbols: npt.NDArray[np.int32]
    symbol_begins: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int64]
    """[CACHED_BYTES + 2] each: the chunk that is being encoded."""
    long: LongChunk


@inner
def merge_chunk(begin, end, tables, scratch, ids, count):
    """BPE of a chunk of up to CACHED_BYTES, by a scan for the next merge."""
    text, symbols, begins, merges = scratch.text, scratch.symbols, scratch.symbol_begins, scratch.merges
    num_symbols = _split_characters(begin, end, text, tables, symbols, begins)
    for index in range(num_symbols - 1):
        merges[index] = _find_merge(symbols[index], symbols[index + 1], tables)
    while num_symbols > 1:
        best, at = _NO_MERGE >> 32, -1
        for index in range(num_symbols - 1):
            if merges[index] >> 32 < best:
                best, at = merges[index] >> 32, index
        if at < 0:
            break
        symbols[at] = np.int32(merges[at] & 0xFFFFFFFF)
        num_symbols -= 1
        for index in range(at + 1, num_symbols):
            symbols[index] = symbols[index + 1]
            begins[index] = begins[index + 1]
            merges[index] = merges[index + 1]
        begins[num_symbols] = begins[num_symbols + 1]
        if at > 0:
            merges[at - 1] = _find_merge(symbols[at - 1], symbols[at], tables)
        if at < num_symbols - 1:
            merges[at] = _find_merge(symbols[at], symbols[at + 1], tables)
    for index in range(num_symbols):
        count = _write_symbol(
            symbols[index], begin + begins[index], begin + begins[index + 1], text, tables, ids, count
        )
    return count


@inner
def merge_long_chunk(begin, end, tables, scratch, ids, count):
    """BPE of a chunk of any size, by a heap of merges: n log n, and 32 bytes of memory for each of its bytes."""
    text, long = scratch.text, scratch.long
    if end - begin >= long.symbols.size:
        return begin - end
    symbols, begins, following, preceding = long.symbols, long.begins, long.following, long.preceding
    num_symbols = _split_characters(begin, end, text, tables, symbols, begins)
    for index in range(num_symbols):
        following[index] = index + 1
        preceding[index] = index - 1
    # An item is `rank << 32 | position`. One whose symbols were merged since is out of date, and is dropped when its
    # turn comes. Each merge takes an item and adds two at most.
    heap = long.heap
    size = 0
    for index in range(num_symbols - 1):
        size = _offer(heap, size, _find_merge(symbols[index], symbols[index + 1], tables), index)
    while size > 0:
        item = heap[0]
        size = _drop_first(heap, size)
        at = item & 0xFFFFFFFF
        if symbols[at] == _MERGED_AWAY or following[at] >= num_symbols:
            continue
        right = following[at]
        merge = _find_merge(symbols[at], symbols[right], tables)
        if merge == _NO_MERGE or merge >> 32 != item >> 32:
            continue
        symbols[at] = np.int32(merge & 0xFFFFFFFF)
        symbols[right] = _MERGED_AWAY
        following[at] = following[right]
        if following[at] < num_symbols:
            preceding[following[at]] = at
            size = _offer(heap, size, _find_merge(symbols[at], symbols[following[at]], tables), at)
        if preceding[at] >= 0:
            size = _offer(heap, size, _find_merge(symbols[preceding[at]], symbols[at], tables), preceding[at])
    at = 0
    while at < num_symbols:
        after = following[at]
        count = _write_symbol(symbols[at], begin + begins[at], begin + begins[after], text, tables, ids, count)
        at = after
    return count


@inner
def _offer(heap, size, merge, position):
    """Push the merge of the symbol at a position with the next one, if there is one; returns the new size."""
    if merge == _NO_MERGE:
        return size
    item = (merge >> 32) << 32 | position
    at = size
    while at > 0 and heap[(at - 1) // 2] > item:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item
    return size + 1


@inner
def _drop_first(heap, size):
    """Pop the smallest item; returns the new size."""
    size -= 1
    item = heap[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
    return size


@inner
def _split_characters(begin, end, text, tables, symbols, begins):
    """Symbols of the characters of a chunk and where, from its begin, theirs is; returns their number."""
    count = 0
    at = begin
    while at < end:
        code_point, size = code_point_at(text, at)
        symbols[count] = tables.id_of_code_point[code_point]
        begins[count] = np.int32(at - begin)
        count += 1
        at += size
    begins[count] = np.int32(end - begin)
    return count


@inner
def _write_symbol(symbol, begin, end, text, tables, ids, count):
    if symbol >= 0:
        ids[count] = symbol
        return count + 1
    for at in range(begin, end):
        ids[count] = tables.id_of_byte[text[at]]
        count += 1
    return count


@inlined
def code_point_at(text, at):
    """Code point and number of bytes of the character there, in valid UTF-8."""
    byte = np.int64(text[at])
    if byte < 0x80:
        return byte, 1
    second = np.int64(text[at + 1]) & 0x3F
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | second, 2
    third = np.int64(text[at + 2]) & 0x3F
    if byte < 0xF0:
        return (byte & 0x0F) << 12 | second << 6 | third, 3
    return (byte & 0x07) << 18 | second << 12 | third << 6 | (np.int64(text[at + 3]) & 0x3F), 4


@inner
def _find_merge(left, right, tables):
    """`rank << 32 | id` of the piece that two symbols make, or _NO_MERGE."""
    if left < 0 or right < 0:
        return _NO_MERGE
    slot = _find_slot(np.int64(left) << 32 | np.int64(right), tables.merge_keys, tables)
    return tables.merge_values[slot] if tables.merge_keys[slot] >= 0 else _NO_MERGE


@inlined
def are_in_a_piece(left, right, tables):
    pairs = tables.pairs_of_characters
    return pairs[_find_slot(left << 32 | right, pairs, tables)] >= 0


@inlined
def _find_slot(key, keys, tables):
    """The slot of a key in a table of `chunk_tables`, or the empty one where it would be."""
    mask = np.uint64(keys.size - 1)
    slot = ((np.uint64(key) * tables.slot_multiplier) >> tables.slot_shift) & mask
    while keys[slot] != -1 and keys[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot
