"""The arrays in which the kernels keep seen chunks and do their work. This module does not need numba."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CACHED_BYTES = 255
"""Bytes of the longest chunk that `merge_chunk` takes, and that the table of seen chunks holds."""
BLOCK_BYTES = 1 << 16
"""Bytes of text in which all borders are found before the chunks are looked up."""
PADDING_BYTES = 24
"""Bytes behind a buffer's content that loads and stores of whole words may touch."""
GROUP_CHUNKS = 32
"""Chunks whose entries are prefetched together, before the first of the chunks is looked up."""

ENTRY_WORDS = 4
"""Words of an entry of `ChunkCache.entries`."""
USED_ENTRIES, USED_CHUNK_BYTES, USED_IDS = range(3)
"""Indices of the counts in `ChunkCache.used`."""


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
    """[BLOCK_BYTES + 1] positions in a block of the text."""
    first_words: npt.NDArray[np.uint64]
    """[GROUP_CHUNKS] bytes 0 to 7 of each chunk of a group."""
    second_words: npt.NDArray[np.uint64]
    """[GROUP_CHUNKS] bytes 8 to 15 of each chunk of a group."""
    slots: npt.NDArray[np.uint64]
    """[GROUP_CHUNKS] slot of the table at which the search for each chunk of a group begins."""
    symbols: npt.NDArray[np.int32]
    """[CACHED_BYTES + 2] pieces of the chunk that is encoded."""
    symbol_begins: npt.NDArray[np.int32]
    """[CACHED_BYTES + 2] positions of the symbols in the chunk."""
    merges: npt.NDArray[np.int64]
    """[CACHED_BYTES + 2] merges of each symbol with the next one."""
    long: LongChunk
