"""The chunk-dictionary kernel: it gives the reference's ids, and copies most of them from a table of seen chunks.

Text is cut into chunks: at hard borders, which `chunk_tables` defines, or into pretokens (`pretoken_kernel`). A chunk
in the table costs a hash, a comparison of its bytes and a copy of its ids. An unseen chunk is encoded by BPE and added
to the table. Ids never depend on the table's content, so the table may be empty or full.

One line as an example, `the cat`, with a vocabulary of 16-bit ids in which no piece has a space behind a letter.
SentencePiece puts a space before it, so `scratch.text` is " the cat" and padding. The border before byte 4 is hard:

    byte       0    1    2    3    4    5    6    7
    text      " "  "t"  "h"  "e"  " "  "c"  "a"  "t"
    borders    0                   4                   8

So the chunks are " the" and " cat". If " the" is the piece 262, its entry in the table has these four words:

    FIRST_KEY    0x65687420    bytes 0 to 7 of the chunk, the first one in the lowest bits
    SECOND_KEY   0             bytes 8 to 15 of the chunk
    SIZES        0x204         4 bytes of text, and 1 id in the bits from 9 on
    IDS          262           ids, the first one in the lowest bits; bits behind the last id have no meaning

A chunk of more than SHORT_BYTES has its hash in FIRST_KEY, and in SECOND_KEY the index of its bytes in `long_chunks`.
Ids that do not fit into one word are in `long_ids`, and IDS is the index of the first one. Both have bit 8 of SIZES.

Numba compiles this. Indices are unsigned, because numba adds a branch for negative values to each signed index, and
does not vectorise such a loop: the search for borders then runs at 1.0 instead of 2.1 GB/s.
"""

from __future__ import annotations

import numpy as np
from numba.cpython.unsafe.numbers import leading_zeros

from services.tokenizer.encoding.bpe_kernel import are_in_a_piece, code_point_at, merge_chunk, merge_long_chunk
from services.tokenizer.encoding.chunk_tables import (
    BLOCK_BYTES,
    CACHED_BYTES,
    ENTRY_WORDS,
    GROUP_CHUNKS,
    SHORT_BYTES,
    USED_CHUNK_BYTES,
    USED_ENTRIES,
    USED_IDS,
    WORD_BYTES,
)
from services.tokenizer.encoding.kernel_compiler import inlined, inner, kernel, load_word, prefetch, store_word
from services.tokenizer.encoding.pretoken_kernel import find_pretokens

FIRST_KEY, SECOND_KEY, SIZES, IDS = (np.uint64(word) for word in range(ENTRY_WORDS))
"""Offsets of an entry's words."""
HAS_UNKNOWN = np.intp(-1 << 62)

_CHUNK_BYTES_MASK = np.uint64(0xFF)
_APART_SHIFT = np.uint64(8)
_SHORT_MASK = np.uint64(0x1FF)
_NUM_IDS_SHIFT = np.uint64(9)
_ENTRY_SHIFT = np.uint64(2)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_OTHER_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)
# Masks by the number of bytes of a chunk: they clear the bytes behind it in its first and its second word.
_FIRST_WORD = np.array([(1 << 8 * min(size, 8)) - 1 for size in range(SHORT_BYTES + 2)], np.uint64)
_SECOND_WORD = np.array([(1 << 8 * min(max(size - 8, 0), 8)) - 1 for size in range(SHORT_BYTES + 2)], np.uint64)


@kernel
def encode_documents(text, begins, ends, bos_id, eos_id, tables, adds_prefix, cache, scratch, ids, offsets):
    """Write ids and offsets as `Encoder.encode` returns them, and return the number of ids.

    A document that has a character of class UNKNOWN gets no ids. A `bos_id` of -1 is none. Returns `-n` when a chunk of
    n bytes does not fit into `scratch.long`: enlarge it and call again. `ids` must have room for one id a byte of text,
    3 more a document, and PADDING_BYTES.
    """
    count = np.intp(0)
    for document in range(begins.size):
        offsets[document] = count
        if begins[document] == ends[document]:
            continue
        if bos_id >= 0:
            ids[count] = bos_id
            count += 1
        end = _copy_document(text[begins[document] : ends[document]], scratch.text, tables.max_digits == 0)
        begin = np.intp(0) if adds_prefix else np.intp(1)
        count = _encode_text(begin, end, tables, cache, scratch, ids, count)
        if count == HAS_UNKNOWN:
            count = offsets[document]
            continue
        if count < 0:
            return count
        ids[count] = eos_id
        count += 1
    offsets[begins.size] = count
    return count


@kernel
def add_pieces(begins, ends, piece_ids, are_whole, tables, cache, scratch, ids):
    """Add the pieces `scratch.text[begins[i]:ends[i]]` to a table: all if `are_whole`, else those that merges make."""
    for index in range(begins.size):
        begin, end = begins[index], ends[index]
        if are_whole or merge_chunk(begin, end, tables, scratch, ids, 0) == 1:
            ids[0] = piece_ids[index]
            entry = _find_entry(begin, end, cache.entries, cache.long_chunks, scratch.text)
            _remember(entry, begin, end, cache, scratch.text, ids, 0, 1)


@inlined
def _copy_document(document, text, replaces):
    """Write a space and the document to `text`, and spaces for U+2581 as SentencePiece if `replaces`. Return the end.

    Byte 0xFF is behind the end.
    """
    text[0] = 0x20
    target = text[1 : 1 + document.size]
    for i in range(document.size):
        target[i] = document[i]
    has_space_piece = np.uint8(0)
    text[1 + document.size] = 0xFF
    for i in range(document.size - 2 if replaces else 0):
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
        first = np.uint32(0)
        if tables.max_digits > 0:
            num_borders, block_end = find_pretokens(text, block_begin, block_end, end, tables, borders)
            if num_borders == 0:
                return HAS_UNKNOWN
        else:
            block = text[block_begin:block_end]
            num_borders = _find_borders(block, text[max(block_begin - 1, 0)], tables.is_soft, borders)
            if block_end == end:
                borders[num_borders] = np.uint32(end - block_begin)
                num_borders += np.uint32(1)
            # A border at the begin of the text would end an empty chunk.
            first = np.uint32(1) if block_begin == begin and borders[np.uint32(0)] == 0 else np.uint32(0)
        for begin_of_group in range(np.intp(first), np.intp(num_borders), GROUP_CHUNKS):
            end_of_group = min(begin_of_group + GROUP_CHUNKS, np.intp(num_borders))
            _prefetch_entries(block_begin, chunk_begin, begin_of_group, end_of_group, cache.entries, scratch)
            index = begin_of_group
            while True:
                num_seen, count = _copy_seen(
                    index - begin_of_group, end_of_group - begin_of_group, cache.entries, scratch.searches, ids, count
                )
                index = begin_of_group + num_seen
                if index == end_of_group:
                    break
                if index > 0:
                    chunk_begin = block_begin + np.intp(borders[np.uint32(index - 1)])
                chunk_end = block_begin + np.intp(borders[np.uint32(index)])
                while chunk_begin < chunk_end:
                    end_of_part = _find_hard_border(chunk_begin, chunk_end, text, tables)
                    count = _encode_chunk(chunk_begin, end_of_part, tables, cache, scratch, ids, count)
                    if count < 0:
                        return count
                    chunk_begin = end_of_part
                index += 1
            chunk_begin = block_begin + np.intp(borders[np.uint32(end_of_group - 1)])
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
def _prefetch_entries(block_begin, chunk_begin, begin, end, entries, scratch):
    """Prefetch the entries of a group of chunks, and write what is searched for to `scratch.searches`.

    The group's chunks end at `borders[begin:end]`, and the first one begins at `chunk_begin`. Most of the time of a
    search is the wait for the entry, and the entries of a group are waited for together.
    """
    text, borders, searches = scratch.text, scratch.borders, scratch.searches
    at = np.uint64(0)
    for index in range(begin, end):
        chunk_end = block_begin + np.intp(borders[np.uint32(index)])
        size = np.uint64(min(chunk_end - chunk_begin, SHORT_BYTES + 1))  # of this size none is found
        first, second = _words(chunk_begin, size, text)
        entry = _first_entry(_hash_short(first, second), entries)
        prefetch(entries, np.intp(entry))
        searches[at + FIRST_KEY] = first
        searches[at + SECOND_KEY] = second
        searches[at + SIZES] = size
        searches[at + IDS] = entry
        at += np.uint64(ENTRY_WORDS)
        chunk_begin = chunk_end


@inlined
def _copy_seen(index, end, entries, searches, ids, count):
    """Copy ids from the table up to the first chunk that is not at its entry. Return its index and the count of ids."""
    while index < end:
        at = np.uint64(index) << _ENTRY_SHIFT
        entry = searches[at + IDS]
        sizes = entries[entry + SIZES]
        difference = (entries[entry + FIRST_KEY] ^ searches[at + FIRST_KEY]) | (
            entries[entry + SECOND_KEY] ^ searches[at + SECOND_KEY]
        )
        if difference | ((sizes & _SHORT_MASK) ^ searches[at + SIZES]) != 0:
            break
        store_word(ids, count, entries[entry + IDS])
        count += np.intp(sizes >> _NUM_IDS_SHIFT)
        index += 1
    return index, count


@inner
def _find_hard_border(begin, end, text, tables):
    """Return the first hard border in text of more than SHORT_BYTES that has none between ASCII bytes, or the end.

    Characters beyond ASCII may have hard borders that their bytes do not show: `is_soft` is cautious there.
    """
    if end - begin <= SHORT_BYTES or tables.max_digits > 0:
        return end
    before, size = code_point_at(text, begin)
    at = begin + size
    while at < end:
        code_point, size = code_point_at(text, at)
        if (code_point >= 0x80 or before >= 0x80) and not are_in_a_piece(before, code_point, tables):
            break
        before = code_point
        at += size
    return at


@inlined
def _encode_chunk(begin, end, tables, cache, scratch, ids, count):
    """Encode the chunk `scratch.text[begin:end]` of any size, and return the new count of ids."""
    if end - begin > CACHED_BYTES:
        return merge_long_chunk(begin, end, tables, scratch, ids, count)
    entry = _find_entry(begin, end, cache.entries, cache.long_chunks, scratch.text)
    if cache.entries[entry + SIZES] == 0:
        encoded = merge_chunk(begin, end, tables, scratch, ids, count)
        _remember(entry, begin, end, cache, scratch.text, ids, count, encoded)
        return encoded
    num_ids = np.intp(cache.entries[entry + SIZES] >> _NUM_IDS_SHIFT)
    if num_ids * ids.itemsize <= WORD_BYTES:
        store_word(ids, count, cache.entries[entry + IDS])
    else:
        place = np.intp(cache.entries[entry + IDS])
        for index in range(num_ids):
            ids[count + index] = cache.long_ids[place + index]
    return count + num_ids


@inner
def _find_entry(begin, end, entries, long_chunks, text):
    """Return the entry of the chunk `text[begin:end]` of at most CACHED_BYTES, or the empty one that is its place."""
    size = np.uint64(end - begin)
    first, second = _keys(begin, size, text)
    entry = _first_entry(_hash_short(first, second) if size <= SHORT_BYTES else first, entries)
    while entries[entry + SIZES] != 0:
        if entries[entry + FIRST_KEY] == first and entries[entry + SIZES] & _CHUNK_BYTES_MASK == size:
            place = np.intp(entries[entry + SECOND_KEY])
            if size > SHORT_BYTES:
                if _are_equal(text[begin:end], long_chunks[place : place + end - begin]):
                    break
            elif entries[entry + SECOND_KEY] == second:
                break
        entry = (entry + np.uint64(ENTRY_WORDS)) & np.uint64(entries.size - 1)
    return entry


@inner
def _remember(entry, begin, end, cache, text, ids, begin_of_ids, end_of_ids):
    """Fill an empty entry with the chunk `text[begin:end]` and its ids, unless the table is three quarters full."""
    size, num_ids = np.uint64(end - begin), end_of_ids - begin_of_ids
    entries, used = cache.entries, cache.used
    num_apart = num_ids if num_ids * ids.itemsize > WORD_BYTES else 0
    bytes_apart = end - begin if size > SHORT_BYTES else 0
    place, place_of_ids = used[USED_CHUNK_BYTES], used[USED_IDS]
    if (
        used[USED_ENTRIES] * 4 >= entries.size // ENTRY_WORDS * 3
        or place + bytes_apart > cache.long_chunks.size
        or place_of_ids + num_apart > cache.long_ids.size
    ):
        return
    first, second = _keys(begin, size, text)
    for index in range(bytes_apart):
        cache.long_chunks[place + index] = text[begin + index]
    for index in range(num_apart):
        cache.long_ids[place_of_ids + index] = ids[begin_of_ids + index]
    entries[entry + FIRST_KEY] = first
    entries[entry + SECOND_KEY] = np.uint64(place) if bytes_apart else second
    is_apart = np.uint64(num_apart + bytes_apart > 0)
    entries[entry + SIZES] = size | is_apart << _APART_SHIFT | np.uint64(num_ids) << _NUM_IDS_SHIFT
    entries[entry + IDS] = np.uint64(place_of_ids) if num_apart else load_word(ids, begin_of_ids)
    used[USED_ENTRIES] += 1
    used[USED_CHUNK_BYTES] += bytes_apart
    used[USED_IDS] += num_apart


@inlined
def _keys(begin, size, text):
    """Return a chunk's words FIRST_KEY and SECOND_KEY, or the hash and 0 for more than SHORT_BYTES."""
    if size <= SHORT_BYTES:
        return _words(begin, size, text)
    return _hash_long(text, begin, size), np.uint64(0)


@inlined
def _words(begin, size, text):
    """Return the first SHORT_BYTES bytes of a chunk as two words."""
    return load_word(text, begin) & _FIRST_WORD[size], load_word(text, begin + WORD_BYTES) & _SECOND_WORD[size]


@inlined
def _first_entry(hashed, entries):
    """Return the index of the entry at which the search for a hash begins: its highest bits."""
    return hashed >> np.uint64(leading_zeros(np.uint64(entries.size // ENTRY_WORDS - 1))) << _ENTRY_SHIFT


@inlined
def _hash_short(first, second):
    return (first ^ (second * _OTHER_MULTIPLIER)) * _MULTIPLIER


@inner
def _hash_long(text, begin, size):
    hashed = size * _OTHER_MULTIPLIER
    for at in range(begin, begin + np.intp(size) - 7, 8):
        hashed = (hashed ^ load_word(text, at)) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    rest = size & np.uint64(7)
    hashed = (hashed ^ (load_word(text, begin + np.intp(size - rest)) & _FIRST_WORD[rest])) * _MULTIPLIER
    return (hashed ^ (hashed >> np.uint64(32))) * _OTHER_MULTIPLIER


@inner
def _are_equal(left, right):
    index = 0
    while index < left.size and left[index] == right[index]:
        index += 1
    return index == left.size
