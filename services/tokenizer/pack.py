"""Packs the tokens of all partitions into shards: a task for each file, which copies tokens and needs no other task.

A task hashes the bytes that it writes and returns the manifest's entry of its file, so that nobody reads a shard to
publish it. The bytes are the same for any number of workers. A task holds one shard in memory.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from services.common.artifacts.corpus import (
    SPLITS,
    Split,
    SplitCounts,
    Vocabulary,
    arrow_schema,
    shard_path,
    tail_path,
)
from services.common.artifacts.corpus_rows import check_rows, digest_checks
from services.common.artifacts.manifest import FileEntry, sync_folder
from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher
from services.common.recipe.schema import Corpus
from services.tokenizer.arrow_arrays import array_of_numbers, numbers_of
from services.tokenizer.encode_task import EncodedPartitions, read_whole_partition, starts_path, tokens_path
from services.tokenizer.encoding.encoder import Offsets, TokenDtype, TokenIds, token_dtype
from services.tokenizer.tasks import TEMPORARY_SUFFIX, map_array, run_largest_first, write_file


@dataclass(frozen=True)
class PackTask:
    """The input of `pack_file`, which is sent to a worker process: tokens [begin, end) of a split go into a file."""

    folder: Path
    """Folder of the files to publish."""
    encoded: Path
    """Folder of the encoded partitions."""
    split: Split
    token_dtype: TokenDtype
    sequence_length: int
    shard: int | None
    """Number of the shard; None for the tail."""
    begin: int
    end: int
    runs: tuple[tuple[int, int, int], ...]
    """The partitions with these tokens, each with the first and the end of its tokens in the split."""

    @property
    def path(self) -> str:
        """Path of the file in the corpus."""
        return tail_path(self.split) if self.shard is None else shard_path(self.split, self.shard)


@dataclass(frozen=True)
class PackedFile:
    """The result of a task."""

    entry: FileEntry
    check_digest: str
    tokens: int
    documents: int
    """Number of documents that begin in the file."""


def pack_splits(
    folder: Path,
    encoded_folder: Path,
    encoded: EncodedPartitions,
    corpus: Corpus,
    vocabulary: Vocabulary,
    launcher: Launcher,
    num_workers: int,
) -> tuple[dict[Split, SplitCounts], list[FileEntry]]:
    """Write the shards and the tails of all splits below `folder`; return the splits' counts and the files' entries.

    Documents are counted by the encoder, and rows by the tasks that wrote them: a lost token shows in the sums.
    """
    tasks: list[PackTask] = []
    dtype = token_dtype(vocabulary.vocab_size)
    for split in SPLITS:
        (folder / split / "tail").mkdir(parents=True)
        first = PackTask(folder, encoded_folder, split, dtype, corpus.sequence_length, None, 0, 0, ())
        tasks += _plan_files(first, encoded.tokens(split), corpus.rows_per_shard)
    sizes = np.array([task.end - task.begin for task in tasks]) * np.dtype(dtype).itemsize
    packed = run_largest_first(launcher, pack_file, tasks, sizes, num_workers, title="pack", unit="bytes")
    for split in SPLITS:
        for path in (folder / split).glob(f"**/*{TEMPORARY_SUFFIX}"):  # of a task that was lost with its node
            path.unlink(missing_ok=True)
        sync_folder(folder / split / "tail")
        sync_folder(folder / split)
    counts = {split: _count(split, tasks, packed, encoded, vocabulary) for split in SPLITS}
    return counts, [file.entry for file in packed]


def _plan_files(task: PackTask, tokens: npt.NDArray[np.int64], rows_per_shard: int) -> list[PackTask]:
    """Return the tasks like `task` for all files of its split, in which partition i has `tokens[i]` tokens."""
    offsets = np.append(0, np.cumsum(tokens))
    num_tokens = int(offsets[-1])
    tokens_of_rows = num_tokens - num_tokens % task.sequence_length
    tokens_per_shard = rows_per_shard * task.sequence_length

    def make_task(shard: int | None, begin: int, end: int) -> PackTask:
        partitions = range(np.searchsorted(offsets, begin, "right") - 1, np.searchsorted(offsets, end, "left"))
        runs = tuple((index, *offsets[index : index + 2].tolist()) for index in partitions if tokens[index])
        return replace(task, shard=shard, begin=begin, end=end, runs=runs)

    tasks = [
        make_task(shard, begin, min(begin + tokens_per_shard, tokens_of_rows))
        for shard, begin in enumerate(range(0, tokens_of_rows, tokens_per_shard))
    ]
    return [*tasks, make_task(None, tokens_of_rows, num_tokens)]


def _count(
    split: Split,
    tasks: Sequence[PackTask],
    packed: Sequence[PackedFile],
    encoded: EncodedPartitions,
    vocabulary: Vocabulary,
) -> SplitCounts:
    """Return a split's counts. Raises `ArtifactError` when the files do not begin as many documents as were encoded."""
    own = [file for task, file in zip(tasks, packed, strict=True) if task.split == split]
    totals = encoded.totals(split)
    begun = sum(file.documents for file in own)
    if begun != totals.documents:
        raise ArtifactError(
            f"{split}: {totals.documents:,} documents were encoded, and {begun:,} begin in the shards. Files in the "
            f"scratch folder have changed. Run the same command again."
        )
    return SplitCounts(
        documents=totals.documents,
        text_bytes=totals.text_bytes,
        document_tokens=totals.tokens - vocabulary.num_special_tokens * totals.documents,
        bos=totals.documents if vocabulary.bos_id is not None else 0,
        eos=totals.documents,
        rows=sum(file.tokens for file in own[:-1]) // tasks[0].sequence_length,
        tail_tokens=own[-1].tokens,
        check_digests=tuple(file.check_digest for file in own),
    )


def pack_file(task: PackTask) -> PackedFile:
    """Write a shard or a tail. Two processes that run the same task write the same bytes."""
    tokens, starts = _read_tokens(task)
    batch = (_make_tail if task.shard is None else _make_rows)(task, tokens, starts)
    # A Python file, because a full disk is then an OSError with its errno.
    with write_hashed_file(task.folder / task.path) as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    check_digest = digest_checks(numbers_of(batch.column("check")))
    return PackedFile(file.entry(task.path), check_digest, len(tokens), len(starts))


def _read_tokens(task: PackTask) -> tuple[TokenIds, Offsets]:
    """Return the tokens of the file, and the positions among them at which documents begin.

    The task that has a partition's first token compares it with its checksums, or raises `ArtifactError`: its files
    are not synced, and a lost node may have left zeros in them.
    """
    tokens: TokenIds = np.empty(task.end - task.begin, task.token_dtype)
    starts: list[Offsets] = [np.empty(0, np.int64)]
    for partition, first, last in task.runs:
        low, high = max(task.begin, first) - first, min(task.end, last) - first
        path = tokens_path(task.encoded, partition, task.split)
        own = map_array(path, tokens.dtype) if path.exists() else tokens[:0]
        is_to_check = task.begin <= first < task.end
        if len(own) != last - first or (
            is_to_check and not read_whole_partition(task.encoded, partition, [task.split])
        ):
            raise ArtifactError(
                f"{path}: is not as its task wrote it ({len(own):,} of {last - first:,} tokens, or other bytes). "
                f"Rerun the same command, which encodes the partition again."
            )
        at = first - task.begin
        tokens[at + low : at + high] = own[low:high]
        own_starts = map_array(starts_path(task.encoded, partition, task.split), np.int64)
        starts.append(own_starts[slice(*np.searchsorted(own_starts, [low, high]))] + at)
    return tokens, np.concatenate(starts)


def _make_rows(task: PackTask, tokens: TokenIds, starts: Offsets) -> pa.RecordBatch:
    """Make the record batch of a shard from its tokens and the positions where documents begin."""
    length = task.sequence_length
    schema = arrow_schema(task.token_dtype, length)
    row_of_start, position = np.divmod(starts, length)
    starts_per_row = np.bincount(row_of_start, minlength=len(tokens) // length)
    input_ids = pa.FixedSizeListArray.from_arrays(array_of_numbers(tokens), type=schema.field("input_ids").type)
    return _make_batch(task, schema, input_ids, tokens.reshape(-1, length), starts_per_row, position)


def _make_tail(task: PackTask, tokens: TokenIds, starts: Offsets) -> pa.RecordBatch:
    """Make a record batch of one row, whose `input_ids` is as long as the tail."""
    rows = arrow_schema(task.token_dtype, task.sequence_length)
    schema = rows.set(0, pa.field("input_ids", pa.list_(rows.field("input_ids").type.value_field), nullable=False))
    offsets = array_of_numbers(np.array([0, len(tokens)], np.int32))
    input_ids = pa.ListArray.from_arrays(offsets, array_of_numbers(tokens), type=schema.field("input_ids").type)
    return _make_batch(task, schema, input_ids, tokens[np.newaxis], np.array([len(starts)]), starts)


def _make_batch(
    task: PackTask,
    schema: pa.Schema,
    input_ids: pa.Array,
    ids_RL: TokenIds,
    starts_per_row: npt.NDArray[np.int64],
    starts: Offsets,
) -> pa.RecordBatch:
    """Make a record batch of `input_ids`, which are `ids_RL`, and the columns `doc_starts` and `check`."""
    offsets, stored_starts = np.zeros(len(starts_per_row) + 1, np.int32), starts.astype(np.int32)
    np.cumsum(starts_per_row, out=offsets[1:])
    doc_starts = pa.ListArray.from_arrays(
        array_of_numbers(offsets), array_of_numbers(stored_starts), type=schema.field("doc_starts").type
    )
    checks = check_rows(task.split, task.begin // task.sequence_length, ids_RL, offsets, stored_starts)
    return pa.record_batch([input_ids, doc_starts, array_of_numbers(checks)], schema=schema)


class HashedFile(io.RawIOBase):
    """A file that is open for writing. `entry` describes it once everything is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._fast, self._strong, self._bytes = xxhash.xxh3_128(), hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._fast.update(content)
        self._strong.update(content)
        self._bytes += len(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._bytes

    def entry(self, path: str) -> FileEntry:
        """Return the manifest's entry for the file, whose path in the artifact is `path`."""
        return FileEntry(path=path, bytes=self._bytes, xxh3_128=self._fast.hexdigest(), sha256=self._strong.hexdigest())


@contextmanager
def write_hashed_file(path: Path) -> Iterator[HashedFile]:
    """Yield a temporary file; rename it to `path` when its bytes are on the disk. The caller syncs the folder."""
    with write_file(path) as file:
        yield HashedFile(file)
        file.flush()
        os.fsync(file.fileno())
