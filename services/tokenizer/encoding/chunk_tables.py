"""The arrays that the chunk kernel reads and writes: a vocabulary's tables, seen chunks, and memory to work in.

The proof that encoding chunk by chunk gives SentencePiece's ids: BPE merges two neighbouring symbols only when their
concatenation is a piece. Call the border between two characters *hard* when no piece has the two next to each other.
Then no symbol ever spans the border. A merge depends on its own two symbols alone (the highest score first, the
leftmost of equals), so merges on the left of a hard border do not influence merges on the right. Therefore
encode(left + right) = encode(left) + encode(right), and the ids of a chunk between two hard borders can be looked up.

The chunks of a byte-level vocabulary are its pretokens, which it encodes one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.vocabularies.sentencepiece_model import PieceKind, load_model, read_settings

SPACE_PIECE = "\u2581"
"""The character that SentencePiece writes for a space in its pieces. The kernel uses a space itself."""

NO_SYMBOL = -1
"""The symbol of a character or a byte that has no piece."""
NO_MERGE = np.int64(0x7FFFFFFFFFFFFFFF)
"""The value in place of a merge for two symbols that make no piece."""
_CODE_POINTS = 0x110000
SLOT_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SLOT_SHIFT = np.uint64(40)
"""The first slot of a key in a hash table is `(key * SLOT_MULTIPLIER) >> SLOT_SHIFT`, modulo the table's size."""

SHORT_BYTES = 16
"""Bytes of the longest chunk that is its own key in the table of seen chunks."""
CACHED_BYTES = 255
"""Bytes of the longest chunk that `merge_chunk` takes, and that the table of seen chunks holds."""
BLOCK_BYTES = 1 << 16
"""Bytes of text in which all borders are found before the chunks are looked up."""
PADDING_BYTES = 72
"""Bytes behind a buffer's content that loads of 64 bytes and stores of whole words may touch."""
GROUP_CHUNKS = 128
"""Chunks whose entries are prefetched together, before the first of the chunks is looked up."""

WORD_BYTES = 8
ENTRY_WORDS = 4
"""Words of an entry of `ChunkCache.entries`."""
USED_ENTRIES, USED_CHUNK_BYTES, USED_IDS = range(3)
"""Indices of the counts in `ChunkCache.used`."""

OTHER, LETTER, NUMBER, SPACE, UNKNOWN = range(5)
"""Classes of characters in `ChunkTables.classes`. The kernel leaves out documents with one of class UNKNOWN."""


class ChunkTables(NamedTuple):
    """A vocabulary in the form that the kernels read. An empty slot of a hash table has the key -1."""

    is_soft: npt.NDArray[np.uint8]
    """[65,536] by two neighbouring bytes: 1 where text must not be cut between them.

    This is exact for two ASCII characters. Next to other characters it may be 1 at a hard border, because one byte does
    not tell the character: `pairs_of_characters` is exact there.
    """
    pairs_of_characters: npt.NDArray[np.int64]
    """Hash set of `code_point << 32 | code_point`: neighbours in a piece of which one is not ASCII."""
    merges: npt.NDArray[np.int64]
    """Hash table of merges. Items `2 * slot` are keys, `left_id << 32 | right_id`. The item behind a key is its value,
    `rank << 32 | id` of the merged piece. Equal scores have equal ranks.
    """
    merges_of_bytes: npt.NDArray[np.int64]
    """[65,536] values of merges by `left << 8 | right` of two bytes that are characters or symbols, or NO_MERGE."""
    id_of_code_point: npt.NDArray[np.int32]
    """[1,114,112] ids of the pieces of one character, or NO_SYMBOL."""
    id_of_byte: npt.NDArray[np.int32]
    """[256] ids of the byte pieces, which encode characters without a piece."""
    max_digits: int = 0
    """Digits of the longest number in a pretoken, or 0 for SentencePiece, which alone has the first two tables."""
    classes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
    """[2,097,152] classes of all characters, and of byte 0xFF."""


class ChunkCache(NamedTuple):
    """A hash table from chunks to their ids, with linear probing. The docstring of `chunk_kernel` shows an entry."""

    entries: npt.NDArray[np.uint64]
    """ENTRY_WORDS words for each slot. A slot is empty when its word SIZES is 0."""
    long_chunks: npt.NDArray[np.uint8]
    long_ids: npt.NDArray[Any]
    used: npt.NDArray[np.int64]
    """Numbers of entries, of bytes in `long_chunks` and of items in `long_ids`."""


class LongChunk(NamedTuple):
    """Memory for a chunk of more than CACHED_BYTES: its symbols as a doubly linked list, and a heap of merges."""

    symbols: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]
    following: npt.NDArray[np.int32]
    preceding: npt.NDArray[np.int32]
    heap: npt.NDArray[np.int64]


class Scratch(NamedTuple):
    """Memory in which the kernels work. It keeps nothing between two documents."""

    text: npt.NDArray[np.uint8]
    """A document: a space, the document's bytes, and PADDING_BYTES."""
    borders: npt.NDArray[np.uint32]
    """[BLOCK_BYTES + 64] positions in a block of the text."""
    searches: npt.NDArray[np.uint64]
    """[GROUP_CHUNKS * ENTRY_WORDS] words of each chunk of a group, and in the place of ids the entry to begin at."""
    symbols: npt.NDArray[np.int32]
    """[CACHED_BYTES + 2] pieces of the chunk that is encoded."""
    symbol_begins: npt.NDArray[np.int32]
    """[CACHED_BYTES + 2] positions of the symbols in the chunk."""
    merges: npt.NDArray[np.int64]
    """[CACHED_BYTES + 2] merges of each symbol with the next one."""
    long: LongChunk


@lru_cache(maxsize=1)
def obstacle_to_chunks(model: bytes) -> str | None:
    """Return why the kernel must not encode for a model, as the end of a sentence with "because", or None if it may."""
    settings, pieces = read_settings(model), _normal_pieces(model)
    characters = set("".join(pieces))
    without_piece = sorted(characters - pieces.keys())
    checks = [
        (settings.is_bpe, "its model type is not BPE"),
        (not settings.changes_characters, "its normaliser replaces characters"),
        (not settings.removes_extra_whitespaces, "its normaliser removes extra spaces"),
        (settings.escapes_whitespaces, "it does not escape spaces"),
        (not settings.puts_whitespace_last, "it writes spaces at the end of words"),
        (PieceKind.USER_DEFINED not in settings.piece_kinds, "it has user-defined pieces"),
        (PieceKind.UNUSED not in settings.piece_kinds, "it has unused pieces"),
        (SPACE_PIECE in pieces, "it has no piece for a space"),
        (np.count_nonzero(_find_byte_pieces(model) != NO_SYMBOL) == 256, "it has no piece for every byte"),
        (" " not in characters, "a piece has a space that is not escaped"),
        (not without_piece, f"the characters {without_piece[:3]} of its pieces are no pieces themselves"),
    ]
    return next((obstacle for holds, obstacle in checks if not holds), None)


def build_tables(model: bytes) -> ChunkTables:
    """Build the tables of a vocabulary without an obstacle, in 0.1 s for 32,000 pieces."""
    id_of_piece = _normal_pieces(model)
    code_points = np.frombuffer("".join(id_of_piece).replace(SPACE_PIECE, " ").encode("utf-32-le"), np.uint32)
    code_points = code_points.astype(np.int64)
    sizes = np.fromiter(map(len, id_of_piece), np.int64, len(id_of_piece))
    piece_of_character = np.repeat(np.arange(len(id_of_piece)), sizes)
    is_inside = piece_of_character[1:] == piece_of_character[:-1]
    left, right = code_points[:-1][is_inside], code_points[1:][is_inside]
    is_soft = np.zeros((256, 256), np.uint8)
    is_soft[:, 0x80:0xC0] = 1  # bytes 2 to 4 of a character
    is_soft[_last_bytes(left), _first_bytes(right)] = 1
    pairs = np.unique((left << 32 | right)[(left | right) >= 0x80])
    is_alone = sizes == 1
    id_of_code_point = np.full(_CODE_POINTS, NO_SYMBOL, np.int32)
    alone = code_points[(np.cumsum(sizes) - sizes)[is_alone]]
    id_of_code_point[alone] = np.fromiter(id_of_piece.values(), np.int32, len(id_of_piece))[is_alone]
    get_score = load_model(model).get_score
    score_of_piece = {piece: float(get_score(index)) for piece, index in id_of_piece.items()}
    rank_of_score = {score: rank for rank, score in enumerate(sorted(set(score_of_piece.values()), reverse=True))}
    merges = find_merges(id_of_piece, map(rank_of_score.__getitem__, score_of_piece.values()))
    return ChunkTables(
        is_soft=is_soft.reshape(-1),
        pairs_of_characters=_hash_table(pairs, np.zeros_like(pairs))[::2].copy(),
        **merge_tables(merges, np.append(id_of_code_point[:128], np.full(128, NO_SYMBOL, np.int32))),
        id_of_code_point=id_of_code_point,
        id_of_byte=_find_byte_pieces(model),
    )


def _last_bytes(code_points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the last byte of each character in UTF-8."""
    return np.where(code_points < 0x80, code_points, 0x80 | code_points & 0x3F)


def _first_bytes(code_points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the first byte of each character in UTF-8."""
    sizes = [code_points < 0x80, code_points < 0x800, code_points < 0x10000]
    first = [code_points, 0xC0 | code_points >> 6, 0xE0 | code_points >> 12]
    return np.select(sizes, first, 0xF0 | code_points >> 18)


def find_merges(id_of_piece: Mapping[Any, int], ranks: Iterable[int]) -> dict[int, int]:
    """Find all pairs of pieces whose concatenation is a piece: SentencePiece and tiktoken merge these, without a list.

    Returns the values of `ChunkTables.merges` by their keys.
    """
    merges = {}
    find = id_of_piece.get
    for (piece, index), rank in zip(id_of_piece.items(), ranks, strict=True):
        for cut in range(1, len(piece)):
            left = find(piece[:cut])
            if left is not None and (right := find(piece[cut:])) is not None:
                merges[left << 32 | right] = rank << 32 | index
    return merges


def merge_tables(merges: dict[int, int], id_of_byte: npt.NDArray[np.int32]) -> dict[str, Any]:
    """Return the tables of merges. Bytes are characters or symbols by `id_of_byte`."""
    ids = id_of_byte.tolist()
    of_bytes = [merges.get(left << 32 | right, NO_MERGE) for left in ids for right in ids]
    keys, values = (np.fromiter(each, np.int64, len(merges)) for each in (merges, merges.values()))
    return {"merges": _hash_table(keys, values), "merges_of_bytes": np.array(of_bytes, np.int64)}


def _hash_table(keys: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Make a hash table with linear probing that is at most a third full, as `ChunkTables.merges`."""
    size = 1 << max(4, (3 * len(keys)).bit_length())
    table_keys, table_values = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    slots = (_hash(keys) >> SLOT_SHIFT).astype(np.int64) & (size - 1)
    left = np.arange(len(keys))
    while len(left):
        is_free = table_keys[slots[left]] == -1
        free = left[is_free]
        table_keys[slots[free]] = keys[free]  # of several keys for one slot the last one stays
        table_values[slots[free]] = values[free]
        left = left[table_keys[slots[left]] != keys[left]]
        slots[left] = (slots[left] + 1) & (size - 1)
    return np.stack([table_keys, table_values], axis=1).reshape(-1)


def _hash(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return keys.view(np.uint64) * SLOT_MULTIPLIER


@lru_cache(maxsize=1)
def _normal_pieces(model: bytes) -> dict[str, int]:
    """Return the ids of the pieces that can match text by the pieces: no control, unknown or byte piece."""
    processor, kinds = load_model(model), read_settings(model).piece_kinds
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.BYTE)
    return {str(processor.id_to_piece(index)): index for index, kind in enumerate(kinds) if kind not in special}


def _find_byte_pieces(model: bytes) -> npt.NDArray[np.int32]:
    """Return the id of the piece of every byte, or NO_SYMBOL."""
    processor = load_model(model)
    id_of_byte: npt.NDArray[Any] = np.full(256, NO_SYMBOL, np.int32)
    for index, kind in enumerate(read_settings(model).piece_kinds):
        if kind == PieceKind.BYTE:
            id_of_byte[int(str(processor.id_to_piece(index))[len("<0x") : -1], 16)] = index
    return id_of_byte
