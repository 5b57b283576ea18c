"""Reads rows of a corpus from memory-mapped files, and checks each row that it reads.

Nothing is opened before a row is wanted: the manifest says which file has a row. Opening a file costs 0.1 ms and reads
a few pages of it; a row costs the pages that it fills. At most `MAX_MAPS` files are mapped, those used last, for a
corpus of any size.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.common.artifacts.corpus import CorpusPayload, Split, shard_path, tail_path
from services.common.artifacts.files import locate
from services.common.artifacts.row_check import check_row, digest_checks
from services.common.errors import ArtifactError
from services.common.process.limits import explain_lack

MAX_MAPS = 256
"""Files that a reader keeps mapped. Linux allows a process 65,530 maps by default, and a corpus may have more files."""

Tokens = npt.NDArray[np.integer[Any]]


class Row(NamedTuple):
    """Views of a row that fits its check."""

    ids: Tokens
    doc_starts: npt.NDArray[np.int32]
    """Positions in the row at which documents begin."""


class RowFile(NamedTuple):
    """Read-only views of a mapped shard or tail, of which no row is checked."""

    path: Path
    rows: range
    """Numbers in the split of the rows in this file."""
    tokens: Tokens
    """[rows * L], or as many as the tail has"""
    start_offsets: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    checks: npt.NDArray[np.uint64]

    @classmethod
    def map(cls, folder: Path, corpus: CorpusPayload, split: Split, number: int) -> RowFile:
        """Map a shard of the split, or its tail, whose number is that of the shards.

        Raises `ArtifactError` where the file contradicts the manifest (its bytes are not read), and `LimitError` or
        `TryAgain` for lack of maps, memory or descriptors, which says nothing about the file.
        """
        counts = corpus.splits[split]
        if number == corpus.num_shards(split):
            path, rows = tail_path(split), range(counts.rows, counts.rows + 1)
            num_tokens = counts.tail_tokens
        else:
            path, rows = shard_path(split, number), corpus.rows_of_shard(split, number)
            num_tokens = len(rows) * corpus.sequence_length
        file = locate(folder, path)
        try:
            batch = _map_batch(file)
            doc_starts = batch.column("doc_starts")
            found = cls(
                path=file,
                rows=rows,
                tokens=_view(batch.column("input_ids").values),
                start_offsets=_view(doc_starts.offsets),
                starts=_view(doc_starts.values),
                checks=_view(batch.column("check")),
            )
        except (pa.ArrowException, OSError, KeyError, AttributeError, UnicodeDecodeError, MemoryError) as error:
            raise explain_lack(error, file, MAX_MAPS) or ArtifactError(
                f"{file}: cannot be read as a corpus's file: {error}. {advise_verify(folder)}"
            ) from error
        tokens = found.tokens
        if (len(tokens), tokens.dtype, len(batch)) != (num_tokens, np.dtype(corpus.token_dtype), len(rows)):
            raise ArtifactError(
                f"{file}: {len(tokens):,} tokens of {tokens.dtype} in {len(batch):,} rows, the manifest says "
                f"{num_tokens:,} of {corpus.token_dtype} in {len(rows):,}. {advise_verify(folder)}"
            )
        if found.starts.dtype != np.int32 or found.checks.dtype != np.uint64:
            raise ArtifactError(
                f"{file}: doc_starts are {found.starts.dtype} and check is {found.checks.dtype}, expected int32 and "
                f"uint64. {advise_verify(folder)}"
            )
        return found

    def read(self, folder: Path, split: Split, row: int, length: int) -> Row:
        """Return a row by its number in the split, of `length` tokens except in the tail.

        Raises `ArtifactError` for a row that does not fit its check.
        """
        at = row - self.rows.start
        begin, end = self.start_offsets[at : at + 2].tolist()
        ids, starts = self.tokens[at * length : (at + 1) * length], self.starts[begin:end]
        # A negative offset would count from the end, and make another list than Arrow does.
        is_list = 0 <= begin <= end <= len(self.starts)
        stored, found = int(self.checks[at]), check_row(split, row, ids, starts) if is_list else None
        if stored != found:
            raise ArtifactError(
                f"{self.path}: row {at:,} of this file, row {row:,} of {split}, is damaged or in the place of another: "
                f"its ids and doc_starts have the check {_show(found)}, the column check has {_show(stored)}. Do not "
                f"train on it. {advise_verify(folder)}"
            )
        return Row(ids, starts)


class CorpusRows:
    """Gives the rows of a corpus by split and number. Not for use by several threads at a time."""

    def __init__(self, folder: Path, corpus: CorpusPayload, max_maps: int = MAX_MAPS) -> None:
        self.folder, self.corpus = folder, corpus
        self._max_maps = max_maps
        self._mapped: dict[tuple[Split, int], RowFile] = {}  # the file used last comes last

    def read(self, split: Split, row: int) -> Row:
        """Return a row of a split, whose last row is the tail.

        Raises the errors of `RowFile.map` and `RowFile.read`.
        """
        return self.map(split, self._number(split, row)).read(self.folder, split, row, self.corpus.sequence_length)

    def prefetch(self, split: Split, row: int) -> None:
        """Map the file of a row, and ask the kernel to read the row's pages while this process goes on.

        Damage that this meets is left to `read`. The kernel keeps the pages also where the file is unmapped meanwhile.
        """
        try:
            file = self.map(split, self._number(split, row))
        except ArtifactError:
            return
        at, length = row - file.rows.start, self.corpus.sequence_length
        begin, end = file.start_offsets[at : at + 2].tolist()
        for values in (file.tokens[at * length : (at + 1) * length], file.starts[begin:end], file.checks[at : at + 1]):
            _request_pages(values)

    def locate(self, split: Split, row: int) -> Path:
        """Return the path of the file that has a row."""
        return self.map(split, self._number(split, row)).path

    def map(self, split: Split, number: int) -> RowFile:
        """Return the file with this number, mapped now or before. Raises the errors of `RowFile.map`."""
        key = (split, number)
        file = self._mapped.pop(key, None)
        if file is None:
            while len(self._mapped) >= self._max_maps:
                del self._mapped[next(iter(self._mapped))]  # unmapped with the last view of its rows
            file = RowFile.map(self.folder, self.corpus, split, number)
        self._mapped[key] = file
        return file

    def _number(self, split: Split, row: int) -> int:
        """Return the number of the file that has a row of the split."""
        corpus = self.corpus
        return corpus.num_shards(split) if row == corpus.splits[split].rows else row // corpus.rows_per_shard


def map_files(folder: Path, corpus: CorpusPayload, split: Split) -> Iterator[RowFile]:
    """Map the shards of a split and then its tail. A caller that keeps none of them needs one map at a time."""
    for number in range(corpus.num_shards(split) + 1):
        yield RowFile.map(folder, corpus, split, number)


def require_documents(folder: Path, corpus: CorpusPayload, split: Split, found: int) -> None:
    """Raise `ArtifactError` unless the manifest says that so many documents begin in the split."""
    if found != corpus.splits[split].documents:
        raise ArtifactError(
            f"{folder / split}: {found:,} documents begin in its files, the manifest says "
            f"{corpus.splits[split].documents:,}. {advise_verify(folder)}"
        )


def verify_row_file(folder: Path, corpus: CorpusPayload, split: Split, number: int) -> tuple[str, int]:
    """Read all rows of the file with this number in its split. Return the digest of its checks, and the number of
    documents that begin in the file.

    Raises `ArtifactError` for a row that does not fit its check, for an id outside the vocabulary, and as `RowFile.map`
    does.
    """
    file, length = RowFile.map(folder, corpus, split, number), corpus.sequence_length
    for row in file.rows:
        file.read(folder, split, row, length)
    if len(file.tokens) and (largest := int(file.tokens.max())) >= corpus.vocabulary.vocab_size:
        raise explain_foreign_id(file.path, largest, corpus.vocabulary.vocab_size)
    return digest_checks(file.checks), len(file.starts)


def explain_foreign_id(path: Path, largest: int, vocab_size: int) -> ArtifactError:
    """Return the error for a file with an id outside the vocabulary."""
    return ArtifactError(
        f"{path}: has the id {largest:,}, and its vocabulary has {vocab_size:,} ids. Move the corpus away and run the "
        f"tokenizer stage to make it anew."
    )


def _map_batch(path: Path) -> pa.RecordBatch:
    """Return the only record batch of a file, whose views do not point outside the mapped file.

    Of the lists in `doc_starts` only the first and the last offset are read here, so that opening a file costs the same
    for any number of rows; `RowFile.read` checks the offsets of its row.
    """
    with pa.ipc.open_file(pa.memory_map(str(path), "r")) as file:
        if file.num_record_batches != 1:
            raise pa.ArrowInvalid(f"{file.num_record_batches} record batches, expected 1")
        batch = file.get_batch(0)
    batch.validate()
    if any(column.null_count for column in batch.columns):
        raise pa.ArrowInvalid("it has nulls")
    return batch


def _view(values: pa.Array) -> Any:
    return np.from_dlpack(values)  # a view; `to_numpy` imports pandas where that is installed


def _request_pages(values: npt.NDArray[Any]) -> None:
    """Ask the kernel to read the pages of a view of a mapped file, which it may leave undone."""
    address = values.ctypes.data
    page = address - address % mmap.PAGESIZE
    _load_madvise()(page, address + values.nbytes - page, mmap.MADV_WILLNEED)


@cache
def _load_madvise() -> Callable[[int, int, int], int]:
    # The `madvise` of Python's `mmap` is for its own maps, each of which keeps a descriptor.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise


def _show(check: int | None) -> str:
    return "none" if check is None else f"{check:016x}"


def advise_verify(folder: Path) -> str:
    """Return the sentence that says how to find all damage of a corpus."""
    return f"Check the corpus with `python -m services.common.artifacts verify {folder}`."
