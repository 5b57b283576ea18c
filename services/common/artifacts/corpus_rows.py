"""Reads rows of a corpus from memory-mapped files, and checks each row that it reads.

Nothing is opened before a row is wanted: the manifest says which file has a row. Opening a file costs 0.1 ms and reads
a few pages of it; a row costs the pages that it fills. At most `MAX_MAPS` files are mapped, those used last.

The check of a row is the xxh3-64 of its ids as they are stored, in little-endian bytes, followed by its document starts
as little-endian int32. Its seed is the number of the row in its split, plus 2**63 in the validation split, so that a
whole row in another row's place is damage, too. The tail is the row that follows the last full one. A check costs
0.7 us for a row of 8 kB and 1.1 us for one of 16 kB on a core.
"""

from __future__ import annotations

import ctypes
import mmap
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from services.common.artifacts.corpus import CorpusPayload, Split
from services.common.artifacts.files import locate
from services.common.errors import ArtifactError, shell_command

MAX_MAPS = 256
"""Files that a reader keeps mapped. Linux allows a process 65,530 maps by default, and a corpus may have more files."""
_FIRST_SEED: dict[Split, int] = {"train": 0, "validation": 2**63}

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

        Raises `ArtifactError` where the file cannot be read, or contradicts the manifest; its rows are not read.
        """
        path, rows, num_tokens = corpus.row_file(split, number)
        file = locate(folder, path)
        try:
            # Opening a file costs the same for any number of rows: `RowFile.read` checks the offsets of its row.
            with pa.ipc.open_file(pa.memory_map(str(file), "r")) as opened:
                batch = opened.get_batch(0)
            batch.validate()  # no view points outside the mapped file
            doc_starts = batch.column("doc_starts")
            found = cls(
                path=file,
                rows=rows,
                tokens=_view(batch.column("input_ids").values),
                start_offsets=_view(doc_starts.offsets),
                starts=_view(doc_starts.values),
                checks=_view(batch.column("check")),
            )
        except (pa.ArrowException, OSError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{file}: not a file of a corpus: {error}. {advise_verify(folder)}") from error
        has = (len(batch), len(found.tokens), *(each.dtype.name for each in (found.tokens, found.starts, found.checks)))
        expected = (len(rows), num_tokens, corpus.token_dtype, "int32", "uint64")
        if has != expected:
            raise ArtifactError(
                f"{file}: rows, tokens and types of ids, doc_starts and check are {has}, the manifest says {expected}. "
                f"{advise_verify(folder)}"
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
        if not is_list or int(self.checks[at]) != check_row(split, row, ids, starts):
            raise ArtifactError(
                f"{self.path}: row {at:,} of this file, row {row:,} of {split}, is damaged or at the wrong index. "
                f"Do not train on it. {advise_verify(folder)}"
            )
        return Row(ids, starts)


class CorpusRows:
    """Gives the rows of a corpus by split and number. Not for use by several threads at a time."""

    def __init__(self, folder: Path, corpus: CorpusPayload, max_maps: int = MAX_MAPS) -> None:
        self.folder, self.corpus = folder, corpus
        self._max_maps = max_maps
        self._mapped: dict[tuple[Split, int], RowFile] = {}  # the file used last comes last

    def read(self, split: Split, row: int) -> Row:
        """Return a row of a split, whose last row is the tail. Raises what `RowFile.map` and `RowFile.read` raise."""
        return self.file_of(split, row).read(self.folder, split, row, self.corpus.sequence_length)

    def prefetch(self, split: Split, row: int) -> None:
        """Map the file of a row, and ask the kernel to read the row's pages while this process goes on.

        Damage that this meets is left to `read`. The kernel keeps the pages also where the file is unmapped meanwhile.
        """
        try:
            file = self.file_of(split, row)
        except ArtifactError:
            return
        at, length = row - file.rows.start, self.corpus.sequence_length
        begin, end = file.start_offsets[at : at + 2].tolist()
        for values in (file.tokens[at * length : (at + 1) * length], file.starts[begin:end], file.checks[at : at + 1]):
            _request_pages(values)

    def file_of(self, split: Split, row: int) -> RowFile:
        """Return the mapped file that has a row. Raises the errors of `RowFile.map`."""
        corpus = self.corpus
        is_tail = row == corpus.splits[split].rows
        return self.map(split, corpus.num_shards(split) if is_tail else row // corpus.rows_per_shard)

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


def map_files(folder: Path, corpus: CorpusPayload, split: Split) -> Iterator[RowFile]:
    """Map the shards of a split and then its tail. A caller that keeps none of them needs one map at a time."""
    for number in range(corpus.num_shards(split) + 1):
        yield RowFile.map(folder, corpus, split, number)


def check_row(split: Split, row: int, ids: Tokens, doc_starts: npt.NDArray[np.int32]) -> int:
    """Return the check of the row with this number in its split."""
    hasher = xxhash.xxh3_64(ids.data, seed=_FIRST_SEED[split] + row)
    hasher.update(doc_starts.data)
    return hasher.intdigest()


def check_rows(
    split: Split,
    first_row: int,
    ids_RL: Tokens,
    start_offsets: npt.NDArray[np.int32],
    doc_starts: npt.NDArray[np.int32],
) -> npt.NDArray[np.uint64]:
    """Return the checks of consecutive rows, of which the first one has the number `first_row`.

    The document starts of row r of these are `doc_starts[start_offsets[r] : start_offsets[r + 1]]`.
    """
    borders = start_offsets.tolist()
    return np.fromiter(
        (
            check_row(split, first_row + row, ids_L, doc_starts[borders[row] : borders[row + 1]])
            for row, ids_L in enumerate(ids_RL)
        ),
        np.uint64,
        len(ids_RL),
    )


def digest_checks(checks: npt.NDArray[np.uint64]) -> str:
    """Return the xxh3-128 of the checks of a file's rows, which the manifest has for each shard and tail."""
    return xxhash.xxh3_128_hexdigest(checks.data)


def require_own_ids(path: Path, ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Raise `ArtifactError` for an id outside the vocabulary, with which a compiled graph would read foreign memory."""
    if ids.size and (largest := int(ids.max())) >= vocab_size:
        raise ArtifactError(
            f"{path}: has the id {largest:,}, and its vocabulary has {vocab_size:,} ids. Move the corpus away and run "
            f"the tokenizer stage to rebuild it."
        )


def require_documents(folder: Path, corpus: CorpusPayload, split: Split, found: int) -> None:
    """Raise `ArtifactError` unless the manifest says that so many documents begin in the split."""
    if found != corpus.splits[split].documents:
        raise ArtifactError(
            f"{folder / split}: {found:,} documents begin in its files, the manifest says "
            f"{corpus.splits[split].documents:,}. {advise_verify(folder)}"
        )


def advise_verify(folder: Path) -> str:
    """Return the sentence that says how to find all damage of a corpus."""
    command = f"{shell_command('services.common.artifacts', 'verify')} {shlex.quote(str(folder))}"
    return f"Check the corpus with `{command}`."


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
