"""The task that a worker runs: the documents of one partition become token files in the scratch folder.

For each of train and validation a task writes the tokens and the positions where documents begin, and then, last, a
marker with counts and checksums. A task whose marker and files agree has been done before a crash, and is not
done again.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from services.common.artifacts.corpus import SPLITS, Split, Vocabulary
from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import ManifestModel
from services.common.input_file import read_file
from services.tokenizer.atomic_file import write_file
from services.tokenizer.encoding.encoder import BOS_AND_EOS, Offsets, TokenIds
from services.tokenizer.encoding.encoder_choice import EncoderChoice, load_encoder
from services.tokenizer.sources.documents import read_documents
from services.tokenizer.sources.file_range import InputPartition
from services.tokenizer.split_assignment import are_for_validation, are_sampled


@dataclass(frozen=True)
class EncodeTask:
    partition: InputPartition
    scratch: Path
    vocabulary_path: Path
    vocabulary: Vocabulary
    encoder: EncoderChoice
    weight: float
    """Of the partition's source."""
    validation_fraction: float
    min_document_bytes: int
    max_document_bytes: int
    invalid_utf8: Literal["replace", "reject"]

    def tokens_path(self, split: Split) -> Path:
        return self.scratch / f"{self.partition.index:06d}.{split}.tokens"

    def starts_path(self, split: Split) -> Path:
        return self.scratch / f"{self.partition.index:06d}.{split}.starts"

    @property
    def marker_path(self) -> Path:
        return self.scratch / f"{self.partition.index:06d}.json"


class EncodedPart(ManifestModel):
    """What a partition adds to the train or the validation stream."""

    documents: int
    document_tokens: int
    """Without BOS and EOS."""
    tokens_xxh3: str
    starts_xxh3: str

    @property
    def tokens(self) -> int:
        return self.document_tokens + BOS_AND_EOS * self.documents


class EncodedPartition(ManifestModel):
    """The result of a task, and its marker."""

    vocabulary_sha256: str
    choice: EncoderChoice
    """What the recipe said: partitions of an encoder that was wrong are not believed when it is changed."""
    encoder: str
    documents_checked: int
    """By the process that did the task, since it did the one before."""
    documents_read: int
    documents_empty: int
    documents_too_short: int
    documents_not_sampled: int
    documents_with_invalid_utf8: int
    text_bytes: int
    """Of the documents that were kept."""
    parts: dict[Split, EncodedPart]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())


def encode_partition(task: EncodeTask) -> EncodedPartition:
    """Do the task unless it is done. Two processes that do the same task write the same files."""
    return _read_marker(task) or _encode(task)


def _read_marker(task: EncodeTask) -> EncodedPartition | None:
    try:
        done = EncodedPartition.model_validate_json(read_file(task.marker_path, task.scratch))
        files = [(task.tokens_path(split), part.tokens_xxh3) for split, part in done.parts.items()]
        files += [(task.starts_path(split), part.starts_xxh3) for split, part in done.parts.items()]
        is_whole = all(xxh3_of(path) == checksum for path, checksum in files)
    except (FileNotFoundError, ValidationError):
        return None
    is_mine = (done.vocabulary_sha256, done.choice) == (task.vocabulary.sha256, task.encoder)
    return done if is_whole and is_mine else None


def _encode(task: EncodeTask) -> EncodedPartition:
    encoder = load_encoder(task.vocabulary_path, task.vocabulary, task.encoder)
    read = empty = too_short = not_sampled = invalid = text_bytes = 0
    with ExitStack() as stack:
        writers = {split: _PartWriter.open(task, split, stack) for split in SPLITS}
        for batch in read_documents(task.partition.file_ranges, task.invalid_utf8, task.max_document_bytes):
            read += len(batch)
            invalid += batch.num_repaired
            long_enough = batch.select(batch.sizes >= task.min_document_bytes)
            too_short += len(batch) - len(long_enough)
            is_for_validation = are_for_validation(long_enough, task.validation_fraction)
            is_wanted = are_sampled(long_enough, task.weight, task.partition.pass_number)
            if task.partition.pass_number > 0:
                is_wanted &= ~is_for_validation  # to see one twice tells nothing more
            wanted, is_for_validation = long_enough.select(is_wanted), is_for_validation[is_wanted]
            not_sampled += len(long_enough) - len(wanted)
            ids, offsets = encoder.encode(wanted)
            is_kept = np.diff(offsets) > 0
            empty += len(wanted) - int(is_kept.sum())
            text_bytes += int(wanted.sizes[is_kept].sum())
            writers["validation"].append(ids, offsets, is_kept & is_for_validation)
            writers["train"].append(ids, offsets, is_kept & ~is_for_validation)
    encoded = EncodedPartition(
        vocabulary_sha256=task.vocabulary.sha256,
        choice=task.encoder,
        encoder=encoder.name,
        documents_checked=encoder.take_documents_checked(),
        documents_read=read,
        documents_empty=empty,
        documents_too_short=too_short,
        documents_not_sampled=not_sampled,
        documents_with_invalid_utf8=invalid,
        text_bytes=text_bytes,
        parts={split: writer.describe() for split, writer in writers.items()},
    )
    with write_file(task.marker_path) as file:
        file.write(encoded.model_dump_json().encode())
    return encoded


@dataclass
class _PartWriter:
    """Appends to the two files of a part, counting and hashing what passes."""

    tokens_file: BinaryIO
    starts_file: BinaryIO
    documents: int = 0
    tokens: int = 0
    tokens_hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    starts_hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    @classmethod
    def open(cls, task: EncodeTask, split: Split, stack: ExitStack) -> _PartWriter:
        tokens_file = stack.enter_context(write_file(task.tokens_path(split)))
        return cls(tokens_file, stack.enter_context(write_file(task.starts_path(split))))

    def append(self, ids: TokenIds, offsets: Offsets, is_mine: npt.NDArray[np.bool_]) -> None:
        """Add the documents that are marked, each `ids[offsets[i]:offsets[i + 1]]`."""
        borders = np.flatnonzero(np.diff(is_mine, prepend=False, append=False))
        for first, last in borders.reshape(-1, 2).tolist():  # runs of documents
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
            document_tokens=self.tokens - BOS_AND_EOS * self.documents,
            tokens_xxh3=self.tokens_hash.hexdigest(),
            starts_xxh3=self.starts_hash.hexdigest(),
        )
