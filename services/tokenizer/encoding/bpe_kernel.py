"""BPE of one chunk of text: the merge of the highest score first, the leftmost of equals.

Two numbers of 32 bits share one of 64. A merge is `rank << 32 | id` of the merged piece. An item of the heap is
`rank << 32 | position`. A lower rank means a higher score, so the smallest number is the next merge.
"""

from __future__ import annotations

import numpy as np

from services.tokenizer.encoding.chunk_tables import NO_MERGE, SLOT_MULTIPLIER, SLOT_SHIFT
from services.tokenizer.encoding.kernel_compiler import inlined, inner

_MERGED_AWAY = np.int32(-2)  # -1 is NO_SYMBOL
_RANK_SHIFT = 32
_LOW_BITS = 0xFFFFFFFF


@inner
def merge_chunk(begin, end, tables, scratch, ids, count):
    """Encode the chunk `scratch.text[begin:end]` of at most CACHED_BYTES, and return the new count of ids.

    A scan of all merges finds the next one.
    """
    text, symbols, begins, merges = scratch.text, scratch.symbols, scratch.symbol_begins, scratch.merges
    num_symbols = _split_symbols(begin, end, text, tables, symbols, begins)
    for index in range(num_symbols - 1):
        left, right = text[begin + begins[index]], text[begin + begins[index + 1]]
        if tables.max_digits > 0 or left | right < 0x80:
            merges[index] = tables.merges_of_bytes[np.intp(left) << 8 | np.intp(right)]
        else:
            merges[index] = _find_merge(symbols[index], symbols[index + 1], tables)
    while num_symbols > 1:
        best, at = NO_MERGE >> _RANK_SHIFT, -1
        for index in range(num_symbols - 1):
            if merges[index] >> _RANK_SHIFT < best:
                best, at = merges[index] >> _RANK_SHIFT, index
        if at < 0:
            break
        symbols[at] = np.int32(merges[at] & _LOW_BITS)
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
    """Encode the chunk `scratch.text[begin:end]` of any size, and return the new count of ids.

    A heap finds the next merge: the time is n log n, and the memory 32 bytes for each byte of the chunk. Returns `-n`
    when `scratch.long` is too small for the chunk's n bytes.
    """
    text, long = scratch.text, scratch.long
    if end - begin >= long.symbols.size:
        return begin - end
    symbols, begins, following, preceding = long.symbols, long.begins, long.following, long.preceding
    num_symbols = _split_symbols(begin, end, text, tables, symbols, begins)
    for index in range(num_symbols):
        following[index] = index + 1
        preceding[index] = index - 1
    # An item whose symbols were merged after it was added is out of date, and is skipped when it is the smallest. Each
    # merge removes one item and adds at most two.
    heap = long.heap
    size = 0
    for index in range(num_symbols - 1):
        size = _offer(heap, size, _find_merge(symbols[index], symbols[index + 1], tables), index)
    while size > 0:
        item = heap[0]
        size = _drop_first(heap, size)
        at = item & _LOW_BITS
        if symbols[at] == _MERGED_AWAY or following[at] >= num_symbols:
            continue
        right = following[at]
        merge = _find_merge(symbols[at], symbols[right], tables)
        if merge == NO_MERGE or merge >> _RANK_SHIFT != item >> _RANK_SHIFT:
            continue
        symbols[at] = np.int32(merge & _LOW_BITS)
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
    """Add the merge of a symbol with the next one to the heap, unless it is NO_MERGE. Return the heap's new size."""
    if merge == NO_MERGE:
        return size
    item = (merge >> _RANK_SHIFT) << _RANK_SHIFT | position
    at = size
    while at > 0 and heap[(at - 1) // 2] > item:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item
    return size + 1


@inner
def _drop_first(heap, size):
    """Remove the smallest item, and return the heap's new size."""
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
def _split_symbols(begin, end, text, tables, symbols, begins):
    """Write a chunk's characters, or bytes, as symbols, and their positions in the chunk. Return their number."""
    count = 0
    at = begin
    while at < end:
        if tables.max_digits > 0:
            symbols[count], size = tables.id_of_byte[text[at]], 1
        else:
            code_point, size = code_point_at(text, at)
            symbols[count] = tables.id_of_code_point[code_point]
        begins[count] = np.int32(at - begin)
        count += 1
        at += size
    begins[count] = np.int32(end - begin)
    return count


@inner
def _write_symbol(symbol, begin, end, text, tables, ids, count):
    """Write a symbol's id, or one id a byte for a character without a piece. Return the new count of ids."""
    if symbol >= 0:
        ids[count] = symbol
        return count + 1
    for at in range(begin, end):
        ids[count] = tables.id_of_byte[text[at]]
        count += 1
    return count


@inlined
def code_point_at(text, at):
    """Return the code point and the number of bytes of the character at a position of valid UTF-8."""
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
    """Return the merge of two symbols, or NO_MERGE when they make no piece."""
    if left < 0 or right < 0:
        return NO_MERGE
    key = np.int64(left) << 32 | np.int64(right)
    merges = tables.merges
    mask = np.uint64(merges.size // 2 - 1)
    slot = ((np.uint64(key) * SLOT_MULTIPLIER) >> SLOT_SHIFT) & mask
    while True:
        found = merges[slot << np.uint64(1)]
        if found == key:
            return merges[slot << np.uint64(1) | np.uint64(1)]
        if found == -1:
            return NO_MERGE
        slot = (slot + np.uint64(1)) & mask


@inlined
def are_in_a_piece(left, right, tables):
    """Return whether a piece has two characters, of which one is not ASCII, next to each other."""
    key = left << 32 | right
    pairs = tables.pairs_of_characters
    mask = np.uint64(pairs.size - 1)
    slot = ((np.uint64(key) * SLOT_MULTIPLIER) >> SLOT_SHIFT) & mask
    while pairs[slot] != -1 and pairs[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return pairs[slot] >= 0
