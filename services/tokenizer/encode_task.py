"""The task of a worker: it encodes the documents of one partition to files in the scratch folder.

For train and for validation a task writes a file of tokens and a file of the positions where documents begin. Last it
writes a marker with counts and checksums. When a command is repeated, a task whose marker fits its files is not run
again.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.corpus import SPLITS, Split, Vocabulary
from services.common.artifacts.manifest import ManifestModel
from services.tokenizer.atomic_file import write_file
from services.tokenizer.duplicates import DuplicateList
from services.tokenizer.encoding.encoder import BOS_AND_EOS, Offsets, TokenIds
from services.tokenizer.encoding.encoder_choice import EncoderChoice, load_encoder
from services.tokenizer.plan_folder import PlanFolder
from services.tokenizer.scratch_tree import path_in_tree, starts_path, tokens_path
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.split_assignment import are_for_training, are_for_validation
from services.tokenizer.task_marker import read_marker, write_marker
from services.tokenizer.text_batch import TextBatch


@dataclass(frozen=True)
class EncodeTask:
    """The input of `encode_partition`, which is sent to a worker process."""

    index: int
    """Number of the partition in the plan."""
    plan: Path
    """Folder of the plan."""
    scratch: Path
    vocabulary_path: Path
    vocabulary: Vocabulary
    encoder: EncoderChoice
    sampled_bytes: int
    """Bytes of text that a worker also encodes with the reference library, in its first tasks."""
    weight: float
    """The weight of the partition's source."""
    validation_fraction: float
    min_document_bytes: int
    max_document_bytes: int
    invalid_utf8: Literal["replace", "reject"]
    duplicates: DuplicateList | None
    """The exact duplicates in the partition, which are dropped; None to keep them."""

    def tokens_path(self, split: Split) -> Path:
        return tokens_path(self.scratch, self.index, split)

    def starts_path(self, split: Split) -> Path:
        return starts_path(self.scratch, self.index, split)

    @property
    def marker_path(self) -> Path:
        return path_in_tree(self.scratch, self.index, ".json")


class EncodedPart(ManifestModel):
    """The part of a partition that belongs to train or to validation."""

    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    document_tokens: int
    """Number of tokens without BOS and EOS."""
    tokens_xxh3: str
    starts_xxh3: str

    @property
    def tokens(self) -> int:
        return self.document_tokens + BOS_AND_EOS * self.documents


class EncodedPartition(ManifestModel):
    """The result of a task. Its JSON is the task's marker."""

    index: int
    """Number of the partition in the plan."""
    vocabulary_sha256: str
    choice: EncoderChoice
    """The recipe's `tokenizer.encoder`. A task with another choice does not use this result."""
    encoder: str
    text_xxh3: str
    """Hash of the documents that were read, with those that went into no split."""
    documents_checked: int
    """Documents that the worker compared with the reference during this task."""
    documents_read: int
    documents_empty: int
    documents_too_short: int
    documents_duplicate: int
    documents_not_sampled: int
    documents_with_invalid_utf8: int
    parts: dict[Split, EncodedPart]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())


def encode_partition(task: EncodeTask) -> EncodedPartition:
    """Run the task, unless its files are complete. Two processes that run the same task write the same bytes."""
    return _read_marker(task) or _encode(task)


def _read_marker(task: EncodeTask) -> EncodedPartition | None:
    """Return the result of a task that was run before, or None when its files are incomplete or of other settings."""
    done = read_whole_partition(task.scratch, task.index)
    has_same_settings = done and (done.vocabulary_sha256, done.choice) == (task.vocabulary.sha256, task.encoder)
    return done if has_same_settings else None


def read_whole_partition(scratch: Path, index: int, splits: Collection[Split] = SPLITS) -> EncodedPartition | None:
    """Return the result of the task that encoded a partition, or None when its marker or a file is not whole.

    The partition's files of these splits are read and compared with the checksums in the marker. A marker that belongs
    to another partition counts as missing.
    """

    def checksums(done: EncodedPartition) -> dict[Path, str]:
        tokens = {tokens_path(scratch, index, split): done.parts[split].tokens_xxh3 for split in splits}
        return tokens | {starts_path(scratch, index, split): done.parts[split].starts_xxh3 for split in splits}

    done = read_marker(path_in_tree(scratch, index, ".json"), scratch, EncodedPartition, checksums)
    return done if done and done.index == index else None


def _encode(task: EncodeTask) -> EncodedPartition:
    encoder = load_encoder(task.vocabulary_path, task.vocabulary, task.encoder, task.sampled_bytes)
    partition = PlanFolder(task.plan).read_partition(task.index)
    task.marker_path.parent.mkdir(exist_ok=True)
    text_hash = _TextHash()
    read = empty = too_short = duplicate = not_sampled = invalid = 0
    duplicates = task.duplicates.read() if task.duplicates else np.empty(0, np.int64)
    with ExitStack() as stack:
        writers = {split: _PartWriter.open(task, split, stack) for split in SPLITS}
        for batch in read_documents(partition.file_ranges, task.invalid_utf8, task.max_document_bytes):
            text_hash.update(batch)
            is_too_short = batch.sizes < task.min_document_bytes
            is_duplicate = np.zeros(len(batch), np.bool_)
            is_duplicate[duplicates[slice(*np.searchsorted(duplicates, [read, read + len(batch)]))] - read] = True
            read += len(batch)
            invalid += batch.num_repaired
            too_short += int(is_too_short.sum())
            duplicate += int(is_duplicate.sum())
            left = batch.select(~(is_too_short | is_duplicate))
            is_for_validation = are_for_validation(left, task.validation_fraction)
            is_wanted = are_for_training(left, task.weight, partition.pass_number)
            # All of them, once and whatever the weight: losses of two mixtures are compared on the same documents.
            is_wanted[is_for_validation] = partition.pass_number == 0
            wanted, is_for_validation = left.select(is_wanted), is_for_validation[is_wanted]
            not_sampled += len(left) - len(wanted)
            ids, offsets = encoder.encode(wanted)
            is_kept = np.diff(offsets) > 0
            empty += len(wanted) - int(is_kept.sum())
            writers["validation"].append(ids, offsets, wanted.sizes, is_kept & is_for_validation)
            writers["train"].append(ids, offsets, wanted.sizes, is_kept & ~is_for_validation)
    encoded = EncodedPartition(
        index=task.index,
        vocabulary_sha256=task.vocabulary.sha256,
        choice=task.encoder,
        encoder=encoder.name,
        text_xxh3=text_hash.hexdigest(),
        documents_checked=encoder.take_documents_checked(),
        documents_read=read,
        documents_empty=empty,
        documents_too_short=too_short,
        documents_duplicate=duplicate,
        documents_not_sampled=not_sampled,
        documents_with_invalid_utf8=invalid,
        parts={split: writer.describe() for split, writer in writers.items()},
    )
    write_marker(task.marker_path, encoded)
    return encoded


class _TextHash:
    """Hashes documents as they are read; the hash is the same for batches of any size."""

    def __init__(self) -> None:
        self._text, self._sizes = xxhash.xxh3_128(), xxhash.xxh3_128()

    def update(self, batch: TextBatch) -> None:
        if len(batch):
            self._text.update(batch.text[batch.begins[0] : batch.ends[-1]].data)
            self._sizes.update(batch.sizes.data)

    def hexdigest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._text.digest() + self._sizes.digest())


@dataclass
class _PartWriter:
    """Writes the two files of a part, counts its documents, their bytes and tokens, and hashes the files."""

    tokens_file: BinaryIO
    starts_file: BinaryIO
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    tokens_hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    starts_hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    @classmethod
    def open(cls, task: EncodeTask, split: Split, stack: ExitStack) -> _PartWriter:
        tokens_file = stack.enter_context(write_file(task.tokens_path(split)))
        return cls(tokens_file, stack.enter_context(write_file(task.starts_path(split))))

    def append(
        self, ids: TokenIds, offsets: Offsets, sizes: npt.NDArray[np.int64], is_wanted: npt.NDArray[np.bool_]
    ) -> None:
        """Append every document i that `is_wanted` marks.

        Its ids are `ids[offsets[i]:offsets[i + 1]]`, and its text has `sizes[i]` bytes.
        """
        self.text_bytes += int(sizes[is_wanted].sum())
        borders = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False))
        for first, last in borders.reshape(-1, 2).tolist():  # consecutive documents are written at once
            run = ids[offsets[first] : offsets[last]]
            self._write(self.tokens_file, self.tokens_hash, run)
            self._write(self.starts_file, self.starts_hash, offsets[first:last] - offsets[first] + self.tokens)
            self.documents += last - first
            self.tokens += len(run)

    @staticmethod
    def _write(file: BinaryIO, hasher: xxhash.xxh3_128, values: npt.NDArray[Any]) -> None:
        file.write(values.data)
        hasher.update(values.data)

    def describe(self) -> EncodedPart:
        return EncodedPart(
            documents=self.documents,
            text_bytes=self.text_bytes,
            document_tokens=self.tokens - BOS_AND_EOS * self.documents,
            tokens_xxh3=self.tokens_hash.hexdigest(),
            starts_xxh3=self.starts_hash.hexdigest(),
        )
