"""The chunk kernel's tables of a SentencePiece vocabulary, and the check whether the kernel may encode for it.

The proof that encoding chunk by chunk gives SentencePiece's ids: BPE merges two neighbouring symbols only when their
concatenation is a piece. Call the border between two characters *hard* when no piece has the two next to each other.
Then no symbol ever spans the border. A merge depends on its own two symbols alone (the highest score first, the
leftmost of equals), so merges on the left of a hard border do not influence merges on the right. Therefore
encode(left + right) = encode(left) + encode(right), and the ids of a chunk between two hard borders can be looked up.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import sentencepiece

from services.common.vocabularies.sentencepiece_model import load_model, read_settings

SPACE_PIECE = "\u2581"
"""The character that SentencePiece writes for a space in its pieces. The kernel uses a space itself."""

NO_SYMBOL = -1
"""The symbol of a character or a byte that has no piece."""
_CODE_POINTS = 0x110000
_SLOT_MULTIPLIER = 0x9E3779B97F4A7C15
_SLOT_SHIFT = 40
_UINT64 = 2**64 - 1


class ChunkTables(NamedTuple):
    """A vocabulary in the form that the kernels read. An empty slot of a hash table has the key -1."""

    is_soft: npt.NDArray[np.uint8]
    """[65,536] by two neighbouring bytes: 1 where text must not be cut between them.

    This is exact for two ASCII characters. Next to other characters it may be 1 at a hard border, because one byte does
    not tell the character: `pairs_of_characters` is exact there.
    """
    pairs_of_characters: npt.NDArray[np.int64]
    """Hash set of `code_point << 32 | code_point`: neighbours in a piece of which one is not ASCII."""
    merge_keys: npt.NDArray[np.int64]
    """Keys of the hash table of merges: `left_id << 32 | right_id`."""
    merge_values: npt.NDArray[np.int64]
    """Values of the hash table of merges: `rank << 32 | id` of the merged piece. Equal scores have equal ranks."""
    id_of_code_point: npt.NDArray[np.int32]
    """[1,114,112] ids of the pieces of one character, or NO_SYMBOL."""
    id_of_byte: npt.NDArray[np.int32]
    """[256] ids of the byte pieces, which encode characters without a piece."""
    slot_multiplier: np.uint64
    """Factor of the hash function: the first slot of a key is `(key * slot_multiplier) >> slot_shift`, modulo the size.

    It is a field, because a kernel that was compiled with a constant would keep the constant's old value.
    """
    slot_shift: np.uint64
    """Shift of the hash function, in bits."""


@lru_cache(maxsize=1)
def obstacle_to_chunks(model: bytes) -> str | None:
    """Return why the kernel must not encode for a model, as the end of a sentence with "because", or None if it may."""
    processor, settings = load_model(model), read_settings(model)
    ids = range(processor.vocab_size())
    pieces = {str(processor.id_to_piece(index)) for index in _normal_ids(processor)}
    characters = {character for piece in pieces for character in piece}
    without_piece = sorted(characters - pieces)
    checks = [
        (settings.is_bpe, "its model type is not BPE"),
        (not settings.changes_characters, "its normaliser replaces characters"),
        (not settings.removes_extra_whitespaces, "its normaliser removes extra spaces"),
        (settings.escapes_whitespaces, "it does not escape spaces"),
        (not settings.puts_whitespace_last, "it writes spaces at the end of words"),
        (not settings.has_user_defined_pieces, "it has user-defined pieces"),
        (not any(processor.is_unused(index) for index in ids), "it has unused pieces"),
        (SPACE_PIECE in pieces, "it has no piece for a space"),
        (_count_byte_pieces(processor) == 256, "it has no piece for every byte"),
        (" " not in characters, "a piece has a space that is not escaped"),
        (not without_piece, f"the characters {without_piece[:3]} of its pieces are no pieces themselves"),
    ]
    return next((obstacle for holds, obstacle in checks if not holds), None)


def build_tables(processor: sentencepiece.SentencePieceProcessor) -> ChunkTables:
    """Build the tables of a vocabulary without an obstacle, in 0.3 s for 32,000 pieces."""
    id_of_piece = {str(processor.id_to_piece(index)): index for index in _normal_ids(processor)}
    is_soft = np.zeros((256, 256), np.uint8)
    is_soft[:, 0x80:0xC0] = 1  # bytes 2 to 4 of a character
    pairs_of_characters = set()
    id_of_code_point = np.full(_CODE_POINTS, NO_SYMBOL, np.int32)
    for piece, index in id_of_piece.items():
        text = piece.replace(SPACE_PIECE, " ")
        if len(text) == 1:
            id_of_code_point[ord(text)] = index
        for left, right in pairwise(text):
            is_soft[left.encode()[-1], right.encode()[0]] = 1
            if not (left + right).isascii():
                pairs_of_characters.add(ord(left) << 32 | ord(right))
    merge_keys, merge_values = _hash_table(_find_merges(processor, id_of_piece))
    return ChunkTables(
        is_soft=is_soft.reshape(-1),
        pairs_of_characters=_hash_table(dict.fromkeys(pairs_of_characters, 0))[0],
        merge_keys=merge_keys,
        merge_values=merge_values,
        id_of_code_point=id_of_code_point,
        id_of_byte=_find_byte_pieces(processor),
        slot_multiplier=np.uint64(_SLOT_MULTIPLIER),
        slot_shift=np.uint64(_SLOT_SHIFT),
    )


def _find_merges(processor: sentencepiece.SentencePieceProcessor, id_of_piece: dict[str, int]) -> dict[int, int]:
    """Find all pairs of pieces whose concatenation is a piece: SentencePiece merges these and has no list of them."""
    score_of_id = {index: float(processor.get_score(index)) for index in id_of_piece.values()}
    rank_of_score = {score: rank for rank, score in enumerate(sorted(set(score_of_id.values()), reverse=True))}
    merges = {}
    for piece, index in id_of_piece.items():
        merge = rank_of_score[score_of_id[index]] << 32 | index
        for cut in range(1, len(piece)):
            left, right = id_of_piece.get(piece[:cut]), id_of_piece.get(piece[cut:])
            if left is not None and right is not None:
                merges[left << 32 | right] = merge
    return merges


def _hash_table(entries: dict[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Make a hash table with linear probing that is at most a third full. Return its keys and its values."""
    size = 1 << max(4, (3 * len(entries)).bit_length())
    keys, values = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    for key, value in entries.items():
        slot = (key * _SLOT_MULTIPLIER & _UINT64) >> _SLOT_SHIFT & (size - 1)
        while keys[slot] != -1:
            slot = (slot + 1) & (size - 1)
        keys[slot], values[slot] = key, value
    return keys, values


def _normal_ids(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Return the ids of the pieces that can match text: no control, unknown or byte piece."""
    return [
        index
        for index in range(processor.vocab_size())
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
    ]


def _find_byte_pieces(processor: sentencepiece.SentencePieceProcessor) -> npt.NDArray[np.int32]:
    id_of_byte: npt.NDArray[Any] = np.full(256, NO_SYMBOL, np.int32)
    for index in range(processor.vocab_size()):
        if processor.is_byte(index):
            id_of_byte[int(str(processor.id_to_piece(index))[len("<0x") : -1], 16)] = index
    return id_of_byte


def _count_byte_pieces(processor: sentencepiece.SentencePieceProcessor) -> int:
    return int(np.count_nonzero(_find_byte_pieces(processor) != NO_SYMBOL))
