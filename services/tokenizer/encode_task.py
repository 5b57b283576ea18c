"""The task of a worker: it encodes the documents of one partition to files in the scratch folder.

For train and for validation a task writes a file of tokens and a file of the positions where documents begin, and last
a marker. A partition has a key: the hash of the versions of its files and of all settings that decide its bytes. So the
partition of a corpus with other inputs, whose command was stopped, is used again where its own files are the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.corpus import SPLITS, BadFile, Split, Vocabulary
from services.common.artifacts.manifest import ManifestModel
from services.common.recipe.schema import Corpus, fingerprint
from services.tokenizer.corpus_inputs import CONTENT_VERSION
from services.tokenizer.document_hashes import are_for_training, are_for_validation
from services.tokenizer.duplicates import DuplicateList
from services.tokenizer.encoding.encoder import BOS_AND_EOS, Offsets, TokenIds
from services.tokenizer.encoding.encoder_choice import EncoderChoice, load_encoder, reference_name
from services.tokenizer.partition_plan import PlanFolder
from services.tokenizer.sources.bad_rows import BadRows
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.input_files import InputPartition
from services.tokenizer.tasks import path_in_tree, read_marker, write_file, write_marker
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
    corpus: Corpus
    duplicates: DuplicateList | None
    """The exact duplicates in the partition, which are dropped; None to keep them."""
    others: tuple[Path, ...] = ()
    """Folders of encoded partitions that commands for other inputs have left."""

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
    key: str
    """Hash of all that decides the bytes of the files. A task of another key does not use this result."""
    encoder: str
    text_xxh3: str
    """Hash of the documents that were read, with those that went into no split."""
    counts: dict[str, int]
    """Documents by what became of them, with the names of `CorpusPayload`. Those that the worker has compared with the
    reference during this task are `documents_checked`.
    """
    bad_files: tuple[BadFile, ...]
    files_repaired: tuple[str, ...]
    """Files, or parts of them, that are short and look like another encoding."""
    files_without_text: tuple[str, ...]
    """Files, or parts of them, whose rows are all empty documents."""
    max_document_bytes: int
    """The limit above which a document was a bad row."""
    parts: dict[Split, EncodedPart]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())


def tokens_path(scratch: Path, partition: int, split: Split) -> Path:
    """Return the path of the tokens that a partition has in a split."""
    return path_in_tree(scratch, partition, f".{split}.tokens")


def starts_path(scratch: Path, partition: int, split: Split) -> Path:
    """Return the path of the positions in the tokens of a partition at which documents begin."""
    return path_in_tree(scratch, partition, f".{split}.starts")


def _key_path(scratch: Path, key: str) -> Path:
    """Return the path of the file that has the number of the partition with this key."""
    return scratch / f"key-{key[:2]}" / key


def encode_partition(task: EncodeTask) -> tuple[EncodedPartition, bool]:
    """Return the encoded partition, and whether this call has encoded it: it is not, where its files are complete.

    Two processes that run the same task write the same bytes.
    """
    partition = PlanFolder(task.plan).read_partition(task.index)
    duplicates = task.duplicates.read() if task.duplicates else np.empty(0, np.int64)
    key = _key_of(task, partition, duplicates)
    done = _read_marker(task, key) or _adopt(task, key)
    return (done, False) if done else (_encode(task, partition, duplicates, key), True)


def _key_of(task: EncodeTask, partition: InputPartition, duplicates: npt.NDArray[np.int64]) -> str:
    """Return the hash of all that decides the bytes of an encoded partition, and nothing else.

    What is a bad row, and what becomes of it, is no part of the key, because most partitions have none: `_is_usable`.
    """
    corpus = task.corpus
    settings = [
        CONTENT_VERSION,
        task.vocabulary.model_dump(mode="json"),
        reference_name(task.vocabulary),
        task.encoder,
        partition.pass_number,
        min(1.0, corpus.sources[partition.source].weight - partition.pass_number),
        corpus.validation_fraction,
        corpus.min_document_bytes,
        corpus.invalid_utf8,
        xxhash.xxh3_128_hexdigest(duplicates.data),
    ]
    files = [
        [file.uri, file.name, file.format, file.column, file.version, file.builder, each.begin, each.end]
        for each in partition.file_ranges
        for file in [each.file]
    ]
    return fingerprint([settings, files])


def _read_marker(task: EncodeTask, key: str) -> EncodedPartition | None:
    """Return the result of a task that was run before, or None when its files are incomplete or of other bytes."""
    done = read_whole_partition(task.scratch, task.index)
    return done if done and _is_usable(done, task, key) else None


def _is_usable(done: EncodedPartition, task: EncodeTask, key: str) -> bool:
    """Return whether the task would write the same bytes and find the same bad rows."""
    if done.key != key:
        return False
    if done.bad_files:
        return task.corpus.bad_rows == "skip" and task.corpus.max_document_bytes == done.max_document_bytes
    return task.corpus.max_document_bytes >= done.max_document_bytes


def _adopt(task: EncodeTask, key: str) -> EncodedPartition | None:
    """Return the partition of this key, after a link to its files, from a command for other inputs; None without one.

    The files are never changed in place, and the other command may remove its own names of them at any time.
    """
    for folder in task.others:
        with suppress(FileNotFoundError, ValueError):
            index = int(_key_path(folder, key).read_bytes())
            marker = EncodedPartition.model_validate_json(path_in_tree(folder, index, ".json").read_bytes())
            if not _is_usable(marker, task, key):
                continue
            task.marker_path.parent.mkdir(exist_ok=True)
            for split in SPLITS:
                _link(tokens_path(folder, index, split), task.tokens_path(split))
                _link(starts_path(folder, index, split), task.starts_path(split))
            _write_markers(task, marker.model_copy(update={"index": task.index}))
            return _read_marker(task, key)
    return None


def _link(source: Path, target: Path) -> None:
    """Put a hard link to a file in place of `target`, or a copy on a file system that has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _write_markers(task: EncodeTask, encoded: EncodedPartition) -> None:
    """Write the marker of a partition whose files are written, and then where it is found by its key."""
    write_marker(task.marker_path, encoded)
    path = _key_path(task.scratch, encoded.key)
    path.parent.mkdir(exist_ok=True)
    with write_file(path) as file:
        file.write(str(task.index).encode())


def read_whole_partition(scratch: Path, index: int, splits: Collection[Split] = SPLITS) -> EncodedPartition | None:
    """Return the result of the task that encoded a partition, or None when its marker or a file is not whole.

    The partition's files of these splits are read and compared with the checksums in the marker. A marker that belongs
    to another partition counts as missing.
    """

    def checksums(done: EncodedPartition) -> dict[Path, str]:
        tokens = {tokens_path(scratch, index, split): done.parts[split].tokens_xxh3 for split in splits}
        return tokens | {starts_path(scratch, index, split): done.parts[split].starts_xxh3 for split in splits}

    done = read_marker(path_in_tree(scratch, index, ".json"), EncodedPartition, checksums)
    return done if done and done.index == index else None


def _encode(
    task: EncodeTask, partition: InputPartition, duplicates: npt.NDArray[np.int64], key: str
) -> EncodedPartition:
    corpus, weight = task.corpus, task.corpus.sources[partition.source].weight
    encoder = load_encoder(task.vocabulary_path, task.vocabulary, task.encoder, task.sampled_bytes)
    task.marker_path.parent.mkdir(exist_ok=True)
    text_hash, bad_rows = _TextHash(), BadRows(corpus.bad_rows)
    read = empty = too_short = duplicate = not_sampled = invalid = 0
    with ExitStack() as stack:
        writers = {split: _PartWriter.open(task, split, stack) for split in SPLITS}
        for batch in read_documents(partition.file_ranges, corpus.invalid_utf8, corpus.max_document_bytes, bad_rows):
            text_hash.update(batch)
            is_too_short = batch.sizes < corpus.min_document_bytes
            is_duplicate = np.zeros(len(batch), np.bool_)
            is_duplicate[duplicates[slice(*np.searchsorted(duplicates, [read, read + len(batch)]))] - read] = True
            read += len(batch)
            invalid += batch.num_repaired
            too_short += int(is_too_short.sum())
            duplicate += int(is_duplicate.sum())
            left = batch.select(~(is_too_short | is_duplicate))
            is_for_validation = are_for_validation(left, corpus.validation_fraction)
            is_wanted = are_for_training(left, weight, partition.pass_number)
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
        key=key,
        encoder=encoder.name,
        text_xxh3=text_hash.hexdigest(),
        counts={
            "documents_checked": encoder.take_documents_checked(),
            "documents_read": read,
            "documents_empty": empty,
            "documents_too_short": too_short,
            "documents_duplicate": duplicate,
            "documents_not_sampled": not_sampled,
            "documents_with_invalid_utf8": invalid,
        },
        bad_files=bad_rows.files(),
        files_repaired=tuple(bad_rows.repaired),
        files_without_text=tuple(bad_rows.without_text),
        max_document_bytes=corpus.max_document_bytes,
        parts={split: writer.describe() for split, writer in writers.items()},
    )
    _write_markers(task, encoded)
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
