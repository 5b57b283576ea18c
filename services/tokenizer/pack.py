"""Packs the token files of all partitions into shards: prefix sums over the partitions in plan order, then copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.common.artifacts.corpus import Split, SplitCounts, arrow_schema, shard_path, tail_path
from services.common.artifacts.row_check import check_rows, digest_checks
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encode_task import EncodeTask
from services.tokenizer.encoded_partitions import EncodedPartitions
from services.tokenizer.encoding.encoder import Offsets, TokenIds


@dataclass(frozen=True)
class ShardLayout:
    """Token type, row length and shard size of a corpus."""

    token_dtype: Literal["uint16", "uint32"]
    sequence_length: int
    rows_per_shard: int


def pack_split(
    folder: Path, split: Split, tasks: Sequence[EncodeTask], encoded: EncodedPartitions, layout: ShardLayout
) -> SplitCounts:
    """Write `<split>/shard-*.arrow` and `<split>/tail/tail.arrow` below `folder`, and return the split's counts.

    Documents and their tokens are counted by the encoder, rows and tail by the size of the token files. So a manifest
    whose counts do not add up shows a lost token.
    """
    stream = _Stream.of(split, tasks, layout.token_dtype)
    rows, tail_tokens = divmod(stream.num_tokens, layout.sequence_length)
    (folder / split / "tail").mkdir(parents=True)
    check_digests: list[str] = []
    for first_row in range(0, rows, layout.rows_per_shard):
        last_row = min(first_row + layout.rows_per_shard, rows)
        tokens = stream.read(first_row * layout.sequence_length, last_row * layout.sequence_length)
        path = folder / shard_path(split, len(check_digests))
        check_digests.append(_write_arrow(path, _rows(split, first_row, *tokens, layout)))
    tail = stream.read(rows * layout.sequence_length, stream.num_tokens)
    check_digests.append(_write_arrow(folder / tail_path(split), _tail(split, rows, *tail, layout)))
    totals = encoded.totals(split)
    return SplitCounts(
        documents=totals.documents,
        text_bytes=totals.text_bytes,
        document_tokens=totals.document_tokens,
        bos=totals.documents,
        eos=totals.documents,
        rows=rows,
        tail_tokens=tail_tokens,
        check_digests=tuple(check_digests),
    )


@dataclass(frozen=True)
class _Run:
    """The tokens of one partition, and the position in the split at which they begin."""

    begin: int
    num_tokens: int
    tokens_path: Path
    starts_path: Path


@dataclass(frozen=True)
class _Stream:
    """The tokens of a split in plan order, read from the token files by position."""

    runs: list[_Run]
    token_dtype: str
    num_tokens: int

    @classmethod
    def of(cls, split: Split, tasks: Sequence[EncodeTask], token_dtype: str) -> _Stream:
        sizes = [task.tokens_path(split).stat().st_size // np.dtype(token_dtype).itemsize for task in tasks]
        begins = list(accumulate(sizes, initial=0))
        runs = [
            _Run(begin, size, task.tokens_path(split), task.starts_path(split))
            for task, begin, size in zip(tasks, begins, sizes, strict=False)
            if size
        ]
        return cls(runs, token_dtype, begins[-1])

    def read(self, begin: int, end: int) -> tuple[TokenIds, Offsets]:
        """Return tokens [begin, end) of the split, and the positions among them at which documents begin."""
        tokens: TokenIds = np.empty(end - begin, self.token_dtype)
        starts: list[Offsets] = [np.empty(0, np.int64)]
        first = max(0, bisect_right(self.runs, begin, key=lambda run: run.begin) - 1)
        for run in self.runs[first:]:
            if run.begin >= end:
                break
            low, high = max(begin - run.begin, 0), min(end - run.begin, run.num_tokens)
            at = run.begin - begin
            tokens[at + low : at + high] = np.memmap(run.tokens_path, self.token_dtype, mode="r")[low:high]
            run_starts = np.memmap(run.starts_path, np.int64, mode="r")
            from_document, to_document = np.searchsorted(run_starts, [low, high])
            starts.append(run_starts[from_document:to_document] + at)
        return tokens, np.concatenate(starts)


def _rows(split: Split, first_row: int, tokens: TokenIds, starts: Offsets, layout: ShardLayout) -> pa.RecordBatch:
    """Make the record batch of a shard from its tokens and the positions where documents begin."""
    schema = arrow_schema(layout.token_dtype, layout.sequence_length)
    row_of_start, position = np.divmod(starts, layout.sequence_length)
    starts_per_row = np.bincount(row_of_start, minlength=len(tokens) // layout.sequence_length)
    input_ids = pa.FixedSizeListArray.from_arrays(_array(tokens), type=schema.field("input_ids").type)
    ids_RL = tokens.reshape(-1, layout.sequence_length)
    return pa.record_batch(
        [input_ids, *_starts_and_checks(schema, split, first_row, ids_RL, starts_per_row, position)], schema=schema
    )


def _tail(split: Split, row: int, tokens: TokenIds, starts: Offsets, layout: ShardLayout) -> pa.RecordBatch:
    """Make a record batch of one row, whose `input_ids` is as long as the tail."""
    rows = arrow_schema(layout.token_dtype, layout.sequence_length)
    schema = rows.set(0, pa.field("input_ids", pa.list_(rows.field("input_ids").type.value_field), nullable=False))
    offsets = _array(np.array([0, len(tokens)], np.int32))
    input_ids = pa.ListArray.from_arrays(offsets, _array(tokens), type=schema.field("input_ids").type)
    num_starts = np.array([len(starts)])
    return pa.record_batch(
        [input_ids, *_starts_and_checks(schema, split, row, tokens[np.newaxis], num_starts, starts)], schema=schema
    )


def _starts_and_checks(
    schema: pa.Schema,
    split: Split,
    first_row: int,
    ids_RL: TokenIds,
    starts_per_row: npt.NDArray[np.int64],
    starts: Offsets,
) -> tuple[pa.ListArray, pa.Array]:
    """Make the columns `doc_starts` and `check` of consecutive rows."""
    offsets, stored_starts = np.zeros(len(starts_per_row) + 1, np.int32), starts.astype(np.int32)
    np.cumsum(starts_per_row, out=offsets[1:])
    lists = pa.ListArray.from_arrays(_array(offsets), _array(stored_starts), type=schema.field("doc_starts").type)
    return lists, _array(check_rows(split, first_row, ids_RL, offsets, stored_starts))


def _array(values: npt.NDArray[Any]) -> pa.Array:
    # pa.array() gives the same array, but first imports pandas where it is installed.
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _write_arrow(path: Path, batch: pa.RecordBatch) -> str:
    """Write the file of a record batch, and return the digest of its column `check`."""
    # A Python file, because a full disk is then an OSError with its errno.
    with write_file(path) as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    checks: Any = np.from_dlpack(batch.column("check"))
    return digest_checks(checks)
