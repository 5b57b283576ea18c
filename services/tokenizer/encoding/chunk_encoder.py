"""The encoder that runs the chunk-dictionary kernel, for vocabularies without an `obstacle_to_chunks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.vocabularies.sentencepiece_model import load_model, read_settings
from services.tokenizer.encoding.chunk_kernel import add_pieces, encode_documents
from services.tokenizer.encoding.chunk_tables import (
    BLOCK_BYTES,
    CACHED_BYTES,
    ENTRY_WORDS,
    GROUP_CHUNKS,
    PADDING_BYTES,
    ChunkCache,
    ChunkTables,
    LongChunk,
    Scratch,
    build_tables,
)
from services.tokenizer.encoding.encoder import Offsets, TokenIds, token_dtype
from services.tokenizer.text_batch import TextBatch

_ENTRIES = 2**21  # 64 MiB
_LONG_CHUNKS_BYTES = 32 * 2**20
_LONG_IDS = 8 * 2**20
_FIRST_LONG_CHUNK_BYTES = 2**16
_LINE_WORDS = 8


class ChunkEncoder:
    """Encodes with the reference's ids. Its table of seen chunks is emptied when it fills up."""

    name = "chunk kernel"

    def __init__(
        self,
        tables: ChunkTables,
        bos_id: int | None,
        eos_id: int,
        adds_prefix: bool,
        dtype: np.dtype[Any],
        pieces: Mapping[bytes, int] | None = None,
        are_whole: bool = False,
    ) -> None:
        """The table has `pieces` from the begin: all if they are whole, else those that merges make."""
        self._tables, self._pieces, self._are_whole = tables, pieces or {}, are_whole
        self._bos_id, self._eos_id, self._adds_prefix = -1 if bos_id is None else bos_id, eos_id, adds_prefix
        self._dtype = dtype
        self._cache = _empty_cache(dtype)
        self._scratch = _scratch(0)
        self._add_pieces()

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
        ids = np.empty(batch.text_bytes + 3 * len(batch) + PADDING_BYTES, self._dtype)
        columns = [_read_only(column) for column in (batch.text, batch.begins, batch.ends)]
        policy = self._bos_id, self._eos_id, self._tables, int(self._adds_prefix)
        while (count := encode_documents(*columns, *policy, self._cache, self._scratch, ids, offsets)) < 0:
            self._scratch = self._scratch._replace(long=_long_chunk(-count))
        ids.resize(count, refcheck=False)
        return ids, offsets

    def _make_room(self, batch: TextBatch) -> None:
        """Enlarge the scratch for a batch, and empty the table of chunks when it fills up."""
        longest = int(batch.sizes.max(initial=0))
        if len(self._scratch.text) < longest + 1 + PADDING_BYTES:
            self._scratch = _scratch(longest)._replace(long=self._scratch.long)
        cache = self._cache
        room = [len(cache.entries) // ENTRY_WORDS * 3 / 4, len(cache.long_chunks), len(cache.long_ids)]
        if (cache.used > np.multiply(room, 7 / 8)).any():
            cache.entries[:] = 0
            cache.used[:] = 0
            self._add_pieces()

    def _add_pieces(self) -> None:
        batch = TextBatch.of([*self._pieces, bytes(PADDING_BYTES)])
        piece_ids = np.array([*self._pieces.values()], np.int64)
        scratch = self._scratch._replace(text=batch.text.copy())
        ids = np.empty(CACHED_BYTES + PADDING_BYTES, self._dtype)
        borders = batch.begins[:-1], batch.ends[:-1]
        add_pieces(*borders, piece_ids, self._are_whole, self._tables, self._cache, scratch, ids)


def load_kernels(dtype: npt.DTypeLike) -> None:
    """Load the kernels for ids of a type into this process. Those that no file has are compiled, which takes 6 s."""
    columns: list[Any] = [np.zeros(0, column) for column in ("u1", "i8", "i8", "i8", "i4", "i4")]
    encoder = ChunkEncoder(ChunkTables(*columns), bos_id=0, eos_id=0, adds_prefix=False, dtype=np.dtype(dtype))
    encoder.encode(TextBatch.of([]))


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that numba takes for one type: it compiles a kernel for writable arrays, and again for others."""
    view = np.ascontiguousarray(values).view()
    view.flags.writeable = False
    return view


def _empty_cache(dtype: np.dtype[Any]) -> ChunkCache:
    words = np.zeros(_ENTRIES * ENTRY_WORDS + _LINE_WORDS, np.uint64)
    begin = -(words.ctypes.data // words.itemsize) % _LINE_WORDS  # no entry is in two cache lines
    return ChunkCache(
        entries=words[begin : begin + _ENTRIES * ENTRY_WORDS],
        long_chunks=np.zeros(_LONG_CHUNKS_BYTES, np.uint8),
        long_ids=np.zeros(_LONG_IDS, dtype),
        used=np.zeros(3, np.int64),
    )


def _scratch(longest_document: int) -> Scratch:
    return Scratch(
        text=np.zeros(longest_document + 1 + PADDING_BYTES, np.uint8),
        borders=np.empty(BLOCK_BYTES + 64, np.uint32),
        searches=np.empty(GROUP_CHUNKS * ENTRY_WORDS, np.uint64),
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
