"""The encoder that runs the chunk-dictionary kernel, for vocabularies without an `obstacle_to_chunks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.vocabularies.sentencepiece_model import load_model, read_settings
from services.tokenizer.encoding.chunk_kernel import encode_documents, rehash
from services.tokenizer.encoding.chunk_tables import (
    BLOCK_BYTES,
    CACHED_BYTES,
    ENTRY_WORDS,
    GROUP_CHUNKS,
    PADDING_BYTES,
    USED_ENTRIES,
    ChunkCache,
    ChunkTables,
    LongChunk,
    Scratch,
    build_tables,
)
from services.tokenizer.encoding.encoder import Offsets, TokenIds, token_dtype
from services.tokenizer.text_batch import TextBatch

_FIRST_ENTRIES = 2**17
_MAX_ENTRIES = 2**22  # 128 MiB
_LONG_CHUNKS_BYTES = 32 * 2**20
_LONG_IDS = 8 * 2**20
_FIRST_LONG_CHUNK_BYTES = 2**16
_LINE_WORDS = 8


class ChunkEncoder:
    """Encodes with SentencePiece's ids. Its table of seen chunks grows from batch to batch, up to a limit."""

    name = "chunk kernel"

    def __init__(self, tables: ChunkTables, bos_id: int, eos_id: int, adds_prefix: bool, dtype: np.dtype[Any]) -> None:
        self._tables = tables
        self._bos_id, self._eos_id, self._adds_prefix = bos_id, eos_id, adds_prefix
        self._dtype = dtype
        self._cache = _empty_cache(_FIRST_ENTRIES, dtype)
        self._ids: npt.NDArray[Any] = np.empty(0, dtype)
        self._scratch = _scratch(0)

    @classmethod
    def from_model(cls, model: bytes) -> ChunkEncoder:
        processor = load_model(model)
        dtype = np.dtype(token_dtype(processor.vocab_size()))
        return cls(
            build_tables(model),
            processor.bos_id(),
            processor.eos_id(),
            read_settings(model).adds_dummy_prefix,
            dtype,
        )

    def encode(self, batch: TextBatch) -> tuple[TokenIds, Offsets]:
        """See `Encoder.encode`."""
        self._make_room(batch)
        offsets = np.empty(len(batch) + 1, np.int64)
        while (count := self._encode(batch, offsets)) < 0:
            self._scratch = self._scratch._replace(long=_long_chunk(-count))
        return self._ids[:count].copy(), offsets

    def _encode(self, batch: TextBatch, offsets: Offsets) -> int:
        return encode_documents(
            _read_only(batch.text),
            _read_only(batch.begins),
            _read_only(batch.ends),
            self._bos_id,
            self._eos_id,
            self._tables,
            int(self._adds_prefix),
            self._cache,
            self._scratch,
            self._ids,
            offsets,
        )

    def _make_room(self, batch: TextBatch) -> None:
        most_ids = batch.text_bytes + 3 * len(batch) + PADDING_BYTES
        if len(self._ids) < most_ids:
            self._ids = np.empty(most_ids, self._dtype)
        longest = int(batch.sizes.max(initial=0))
        if len(self._scratch.text) < longest + 1 + PADDING_BYTES:
            self._scratch = _scratch(longest)._replace(long=self._scratch.long)
        self._cache = _with_room(self._cache)


def _with_room(cache: ChunkCache) -> ChunkCache:
    """Return a table with room for a batch: doubled when it fills up, emptied when it cannot grow."""
    num_entries = len(cache.entries) // ENTRY_WORDS
    used = (cache.used / [num_entries, len(cache.long_chunks), len(cache.long_ids)]).tolist()
    used_entries = used.pop(USED_ENTRIES)
    if used_entries > 0.6 and num_entries < _MAX_ENTRIES:
        # Four times the size is slower: the operating system has to clear the pages, and 184 MB took a fifth longer.
        entries = _empty_entries(2 * num_entries)
        rehash(cache.entries, entries)
        return cache._replace(entries=entries)
    if used_entries > 0.74 or max(used) > 7 / 8:
        cache.entries[:] = 0
        cache.used[:] = 0
    return cache


def load_kernels(dtype: npt.DTypeLike) -> None:
    """Load the kernels for ids of a type into this process. Those that no file has are compiled, which takes 6 s."""
    columns: list[Any] = [np.zeros(0, column) for column in ("u1", "i8", "i8", "u8", "i8", "i4", "i4")]
    encoder = ChunkEncoder(ChunkTables(*columns), bos_id=0, eos_id=0, adds_prefix=False, dtype=np.dtype(dtype))
    encoder.encode(TextBatch.of([]))
    rehash(_empty_entries(1), _empty_entries(1))


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that numba takes for one type: it compiles a kernel for writable arrays, and again for others."""
    view = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view


def _empty_cache(num_entries: int, dtype: np.dtype[Any]) -> ChunkCache:
    return ChunkCache(
        entries=_empty_entries(num_entries),
        long_chunks=np.zeros(_LONG_CHUNKS_BYTES, np.uint8),
        long_ids=np.zeros(_LONG_IDS, dtype),
        used=np.zeros(3, np.int64),
    )


def _empty_entries(num_entries: int) -> npt.NDArray[np.uint64]:
    """Return a table that begins at a cache line, so that no entry is in two lines."""
    words = np.zeros(num_entries * ENTRY_WORDS + _LINE_WORDS, np.uint64)
    begin = -(words.ctypes.data // words.itemsize) % _LINE_WORDS
    return words[begin : begin + num_entries * ENTRY_WORDS]


def _scratch(longest_document: int) -> Scratch:
    return Scratch(
        text=np.zeros(longest_document + 1 + PADDING_BYTES, np.uint8),
        borders=np.empty(BLOCK_BYTES + 1, np.uint32),
        first_words=np.empty(GROUP_CHUNKS, np.uint64),
        second_words=np.empty(GROUP_CHUNKS, np.uint64),
        slots=np.empty(GROUP_CHUNKS, np.uint64),
        symbols=np.empty(CACHED_BYTES + 2, np.int32),
        symbol_begins=np.empty(CACHED_BYTES + 2, np.int32),
        merges=np.empty(CACHED_BYTES + 2, np.int64),
        long=_long_chunk(_FIRST_LONG_CHUNK_BYTES),
    )


def _long_chunk(chunk_bytes: int) -> LongChunk:
    symbols, begins, following, preceding = (np.empty(chunk_bytes + 1, np.int32) for _ in range(4))
    return LongChunk(symbols, begins, following, preceding, heap=np.empty(2 * chunk_bytes, np.int64))


if __name__ == "__main__":  # while an image is built
    load_kernels("uint16")
    load_kernels("uint32")
