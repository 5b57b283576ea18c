"""The chunk-dictionary kernel: it gives SentencePiece's ids, and copies most of them from a table of seen chunks.

Text is cut into chunks at hard borders, which `chunk_tables` defines. A chunk in the table costs a hash, a comparison
of its bytes and a copy of its ids. An unseen chunk is encoded by BPE and added to the table. Ids never depend on the
table's content, so the table may be empty or full.

One line as an example, `the cat`, with a vocabulary of 16-bit ids in which no piece has a space behind a letter.
SentencePiece puts a space before it, so `scratch.text` is " the cat" and padding. The border before byte 4 is hard:

    byte       0    1    2    3    4    5    6    7
    text      " "  "t"  "h"  "e"  " "  "c"  "a"  "t"
    borders    0                   4                   8

So the chunks are " the" and " cat". If " the" is the piece 262, its entry in the table has these four words:

    FIRST_KEY    0x65687420    bytes 0 to 7 of the chunk, the first one in the lowest bits
    SECOND_KEY   0             bytes 8 to 15 of the chunk
    SIZES        0x104         4 bytes of text, and 1 id in the bits from 8 on
    IDS          262           ids, the first one in the lowest bits; bits behind the last id have no meaning

A chunk of more than SHORT_BYTES has its hash in FIRST_KEY, and in SECOND_KEY the index of its bytes in `long_chunks`.
Ids that do not fit into one word are in `long_ids`, and IDS is the index of the first one.

Numba compiles this. Indices are unsigned, because numba adds a branch for negative values to each signed index, and
does not vectorise such a loop: the search for borders then runs at 1.0 instead of 2.1 GB/s.
"""

from __future__ import annotations

import numpy as np

from services.tokenizer.encoding.bpe_kernel import are_in_a_piece, code_point_at, merge_chunk, merge_long_chunk
from services.tokenizer.encoding.chunk_tables import (
    BLOCK_BYTES,
    CACHED_BYTES,
    ENTRY_WORDS,
    GROUP_CHUNKS,
    USED_CHUNK_BYTES,
    USED_ENTRIES,
    USED_IDS,
)
from services.tokenizer.encoding.kernel_compiler import inlined, inner, kernel, load_word, prefetch, store_word

SHORT_BYTES = 16
"""Bytes of the longest chunk that is its own key in the table."""
FIRST_KEY, SECOND_KEY, SIZES, IDS = (np.uint64(word) for word in range(ENTRY_WORDS))
"""Offsets of an entry's words."""
WORD_BYTES = 8

_ENTRY_STRIDE = np.uint64(ENTRY_WORDS)
_CHUNK_BYTES_MASK = np.uint64(0xFF)
_NUM_IDS_SHIFT = np.uint64(8)
_HASH_SHIFT = np.uint64(20)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OTHER_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
# Masks by the number of bytes of a chunk: they clear the bytes behind it in its first and its second word.
_FIRST_WORD = np.array([(1 << 8 * min(size, 8)) - 1 for size in range(SHORT_BYTES + 1)], np.uint64)
_SECOND_WORD = np.array([(1 << 8 * max(size - 8, 0)) - 1 for size in range(SHORT_BYTES + 1)], np.uint64)


@kernel
def encode_documents(text, begins, ends, bos_id, eos_id, tables, adds_prefix, cache, scratch, ids, offsets):
    """Write ids and offsets as `Encoder.encode` returns them, and return the number of ids.

    Returns `-n` when a chunk of n bytes does not fit into `scratch.long`: enlarge it and call again. `ids` must have
    room for one id a byte of text, 3 more a document, and PADDING_BYTES.
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
    """Copy all entries of the table `old` into the empty table `new`, and return their number."""
    count = 0
    mask = np.uint64(new.size // ENTRY_WORDS - 1)
    for begin in range(0, old.size, ENTRY_WORDS):
        entry = np.uint64(begin)
        chunk_bytes = old[entry + SIZES] & _CHUNK_BYTES_MASK
        if chunk_bytes == 0:
            continue
        first, second = old[entry + FIRST_KEY], old[entry + SECOND_KEY]
        hashed = _hash_short(first, second, chunk_bytes) if chunk_bytes <= SHORT_BYTES else first
        slot = (hashed >> _HASH_SHIFT) & mask
        while new[slot * _ENTRY_STRIDE + SIZES] != 0:
            slot = (slot + np.uint64(1)) & mask
        for word in range(ENTRY_WORDS):
            new[slot * _ENTRY_STRIDE + np.uint64(word)] = old[entry + np.uint64(word)]
        count += 1
    return count


@inlined
def _copy_document(document, text):
    """Write a space and the document to `text`, with spaces for U+2581 as SentencePiece has it. Return the end."""
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
    """Encode `scratch.text[begin:end]`, write its ids from `ids[count]` on, and return the new count."""
    text, borders = scratch.text, scratch.borders
    chunk_begin = begin
    block_begin = begin
    while block_begin < end:
        block_end = min(block_begin + BLOCK_BYTES, end)
        block = text[block_begin:block_end]
        num_borders = _find_borders(block, text[max(block_begin - 1, 0)], tables.is_soft, borders)
        if block_end == end:
            borders[num_borders] = np.uint32(end - block_begin)
            num_borders += np.uint32(1)
        # A border at the begin of the text would end an empty chunk.
        first = np.uint32(1) if block_begin == begin and borders[np.uint32(0)] == 0 else np.uint32(0)
        for begin_of_group in range(first, num_borders, GROUP_CHUNKS):
            end_of_group = min(begin_of_group + GROUP_CHUNKS, np.intp(num_borders))
            _prefetch_entries(block_begin, chunk_begin, begin_of_group, end_of_group, cache, scratch)
            for index in range(begin_of_group, end_of_group):
                chunk_end = block_begin + np.intp(borders[np.uint32(index)])
                size = chunk_end - chunk_begin
                if size <= SHORT_BYTES:
                    at = np.uint32(index - begin_of_group)
                    words = scratch.first_words[at], scratch.second_words[at]
                    count = _find_short(
                        chunk_begin, chunk_end, words, scratch.slots[at], tables, cache, scratch, ids, count
                    )
                else:
                    count = _encode_long(chunk_begin, chunk_end, tables, cache, scratch, ids, count)
                    if count < 0:
                        return count
                chunk_begin = chunk_end
        block_begin = block_end
    return count


@inlined
def _find_borders(block, byte_before, is_soft, borders):
    """Write the positions in the block at which chunks begin to `borders`, and return their number.

    No branch depends on the text, so that the loop runs at the same speed for all text.
    """
    count = np.uint32(0)
    before = np.uint32(byte_before)
    for position in range(block.size):
        byte = np.uint32(block[position])
        borders[count] = np.uint32(position)
        count += np.uint32(1) - np.uint32(is_soft[(before << np.uint32(8)) | byte])
        before = byte
    return count


@inlined
def _prefetch_entries(block_begin, chunk_begin, begin, end, cache, scratch):
    """Prefetch the entries of a group of chunks, and write the chunks' words and slots to `scratch`.

    The group's chunks end at `borders[begin:end]`, and the first one begins at `chunk_begin`. Most of the time of a
    search is the wait for the entry, and the entries of a group are waited for together. What is written for a chunk of
    more than SHORT_BYTES has no meaning.
    """
    text, borders = scratch.text, scratch.borders
    mask = np.uint64(cache.entries.size // ENTRY_WORDS - 1)
    for index in range(begin, end):
        chunk_end = block_begin + np.intp(borders[np.uint32(index)])
        size = np.uint64(min(chunk_end - chunk_begin, SHORT_BYTES))
        first = load_word(text, chunk_begin) & _FIRST_WORD[size]
        second = load_word(text, chunk_begin + WORD_BYTES) & _SECOND_WORD[size]
        slot = (_hash_short(first, second, size) >> _HASH_SHIFT) & mask
        prefetch(cache.entries, np.intp(slot * _ENTRY_STRIDE))
        at = np.uint32(index - begin)
        scratch.first_words[at] = first
        scratch.second_words[at] = second
        scratch.slots[at] = slot
        chunk_begin = chunk_end


@inlined
def _find_short(begin, end, words, slot, tables, cache, scratch, ids, count):
    """Encode the chunk `scratch.text[begin:end]` of at most SHORT_BYTES, and return the new count of ids.

    `words` are the chunk's bytes, and the search in the table begins at `slot`.
    """
    entries = cache.entries
    size = np.uint64(end - begin)
    first, second = words
    mask = np.uint64(entries.size // ENTRY_WORDS - 1)
    while True:
        entry = slot * _ENTRY_STRIDE
        sizes = entries[entry + SIZES]
        if sizes == 0:
            encoded = merge_chunk(begin, end, tables, scratch, ids, count)
            if _has_room(cache, 0, encoded - count, ids.itemsize):
                _remember(entry, first, second, size, cache, ids, count, encoded)
            return encoded
        has_key = entries[entry + FIRST_KEY] == first and entries[entry + SECOND_KEY] == second
        if has_key and sizes & _CHUNK_BYTES_MASK == size:
            return _copy_ids(entry, cache, ids, count)
        slot = (slot + np.uint64(1)) & mask


@inner
def _encode_short(begin, end, tables, cache, scratch, ids, count):
    """Encode the chunk `scratch.text[begin:end]` of at most SHORT_BYTES, and return the new count of ids."""
    size = np.uint64(end - begin)
    first = load_word(scratch.text, begin) & _FIRST_WORD[size]
    second = load_word(scratch.text, begin + WORD_BYTES) & _SECOND_WORD[size]
    mask = np.uint64(cache.entries.size // ENTRY_WORDS - 1)
    slot = (_hash_short(first, second, size) >> _HASH_SHIFT) & mask
    return _find_short(begin, end, (first, second), slot, tables, cache, scratch, ids, count)


@inner
def _encode_long(begin, end, tables, cache, scratch, ids, count):
    """Encode text without a hard border between its bytes, and return the new count of ids.

    Characters beyond ASCII may have hard borders that their bytes do not show: `is_soft` is cautious there.
    """
    text = scratch.text
    chunk_begin = begin
    at = begin
    before = np.int64(0)
    while at < end:
        code_point, size = code_point_at(text, at)
        is_ascii = code_point < 0x80 and before < 0x80  # `is_soft` is exact for these, and has found no border
        if at > chunk_begin and not is_ascii and not are_in_a_piece(before, code_point, tables):
            count = _encode_chunk(chunk_begin, at, tables, cache, scratch, ids, count)
            if count < 0:
                return count
            chunk_begin = at
        before = code_point
        at += size
    return _encode_chunk(chunk_begin, end, tables, cache, scratch, ids, count)


@inner
def _encode_chunk(begin, end, tables, cache, scratch, ids, count):
    """Encode the chunk `scratch.text[begin:end]` of any size, and return the new count of ids."""
    if end - begin <= SHORT_BYTES:
        return _encode_short(begin, end, tables, cache, scratch, ids, count)
    if end - begin > CACHED_BYTES:
        return merge_long_chunk(begin, end, tables, scratch, ids, count)
    entries = cache.entries
    size = np.uint64(end - begin)
    hashed = _hash_long(scratch.text, begin, end - begin)
    mask = np.uint64(entries.size // ENTRY_WORDS - 1)
    slot = (hashed >> _HASH_SHIFT) & mask
    while True:
        entry = slot * _ENTRY_STRIDE
        sizes = entries[entry + SIZES]
        if sizes == 0:
            encoded = merge_chunk(begin, end, tables, scratch, ids, count)
            if _has_room(cache, end - begin, encoded - count, ids.itemsize):
                place = cache.used[USED_CHUNK_BYTES]
                for index in range(end - begin):
                    cache.long_chunks[place + index] = scratch.text[begin + index]
                cache.used[USED_CHUNK_BYTES] += end - begin
                _remember(entry, hashed, np.uint64(place), size, cache, ids, count, encoded)
            return encoded
        if entries[entry + FIRST_KEY] == hashed and sizes & _CHUNK_BYTES_MASK == size:
            place = np.intp(entries[entry + SECOND_KEY])
            if _are_equal(scratch.text[begin:end], cache.long_chunks[place : place + end - begin]):
                return _copy_ids(entry, cache, ids, count)
        slot = (slot + np.uint64(1)) & mask


@inlined
def _has_room(cache, chunk_bytes, num_ids, id_bytes):
    """Return whether the table takes one more chunk: its slots may be three quarters full, its other arrays full."""
    used = cache.used
    num_apart = num_ids if num_ids * id_bytes > WORD_BYTES else 0
    return (
        used[USED_ENTRIES] * 4 < cache.entries.size // ENTRY_WORDS * 3
        and used[USED_CHUNK_BYTES] + chunk_bytes <= cache.long_chunks.size
        and used[USED_IDS] + num_apart <= cache.long_ids.size
    )


@inner
def _remember(entry, first, second, size, cache, ids, begin, end):
    """Fill an empty entry with a chunk's keys and size, and with the ids `ids[begin:end]`."""
    num_ids = end - begin
    cache.entries[entry + FIRST_KEY] = first
    cache.entries[entry + SECOND_KEY] = second
    cache.entries[entry + SIZES] = size | (np.uint64(num_ids) << _NUM_IDS_SHIFT)
    if num_ids * ids.itemsize <= WORD_BYTES:
        cache.entries[entry + IDS] = load_word(ids, begin)
    else:
        place = cache.used[USED_IDS]
        for index in range(num_ids):
            cache.long_ids[place + index] = ids[begin + index]
        cache.used[USED_IDS] += num_ids
        cache.entries[entry + IDS] = np.uint64(place)
    cache.used[USED_ENTRIES] += 1


@inlined
def _copy_ids(entry, cache, ids, count):
    """Copy an entry's ids to `ids[count:]`, and return the new count."""
    num_ids = np.intp(cache.entries[entry + SIZES] >> _NUM_IDS_SHIFT)
    if num_ids * ids.itemsize <= WORD_BYTES:
        store_word(ids, count, cache.entries[entry + IDS])
    else:
        place = np.intp(cache.entries[entry + IDS])
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
