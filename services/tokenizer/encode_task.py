"""The task that a worker runs: the documents of one input split become token files in the scratch folder.

For each of train and validation a task writes the tokens and the positions where documents begin, and then, last, a
marker with counts and checksums. A task whose marker and files agree has been done before a crash, and is not
done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import xxhash
from pydantic import ValidationError

from services.common.artifacts.corpus import SPLITS, Split, Vocabulary
from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import Record, write_durably
from services.tokenizer.durable_file import write_file
from services.tokenizer.encoder import BOS_AND_EOS, Offsets, TokenIds, load_encoder
from services.tokenizer.sources.documents import Document, read_documents
from services.tokenizer.sources.piece import InputSplit
from services.tokenizer.split_assignment import assign_split

BATCH_BYTES = 4 * 2**20
"""Text handed to the encoder at a time, or one document when that is larger."""


@dataclass(frozen=True)
class EncodeTask:
    split: InputSplit
    scratch: Path
    vocabulary_path: Path
    vocabulary: Vocabulary
    validation_fraction: float
    invalid_utf8: Literal["replace", "reject"]

    def tokens_path(self, split: Split) -> Path:
        return self.scratch / f"{self.split.index:06d}.{split}.tokens"

    def starts_path(self, split: Split) -> Path:
        return self.scratch / f"{self.split.index:06d}.{split}.starts"

    @property
    def marker_path(self) -> Path:
        return self.scratch / f"{self.split.index:06d}.json"


class EncodedPart(Record):
    """What an input split adds to the train or the validation stream."""

    documents: int
    document_tokens: int
    """Without BOS and EOS."""
    tokens_xxh3: str
    starts_xxh3: str

    @property
    def tokens(self) -> int:
        return self.document_tokens + BOS_AND_EOS * self.documents


class EncodedSplit(Record):
    """The result of a task, and its marker."""

    vocabulary_sha256: str
    documents_read: int
    documents_empty: int
    documents_with_invalid_utf8: int
    text_bytes: int
    """Of the documents that were kept."""
    parts: dict[Split, EncodedPart]


def encode_split(task: EncodeTask) -> EncodedSplit:
    """Do the task unless it is done. Two processes that do the same task write the same files."""
    return _read_marker(task) or _encode(task)


def _read_marker(task: EncodeTask) -> EncodedSplit | None:
    try:
        done = EncodedSplit.model_validate_json(task.marker_path.read_bytes())
        files = [(task.tokens_path(split), part.tokens_xxh3) for split, part in done.parts.items()]
        files += [(task.starts_path(split), part.starts_xxh3) for split, part in done.parts.items()]
        is_whole = all(xxh3_of(path) == checksum for path, checksum in files)
    except (FileNotFoundError, ValidationError):
        return None
    return done if is_whole and done.vocabulary_sha256 == task.vocabulary.sha256 else None


def _encode(task: EncodeTask) -> EncodedSplit:
    encoder = load_encoder(task.vocabulary_path, task.vocabulary)
    read = empty = invalid = text_bytes = 0
    with ExitStack() as stack:
        writers = {split: _PartWriter.open(task, split, stack) for split in SPLITS}
        for batch in _batches(read_documents(task.split.pieces, task.invalid_utf8)):
            read += len(batch)
            invalid += sum(document.was_repaired for document in batch)
            for split, texts in _by_split(batch, task.validation_fraction).items():
                ids, doc_offsets = encoder.encode(texts)
                is_kept = np.diff(doc_offsets) > 0
                empty += len(texts) - int(is_kept.sum())
                text_bytes += sum(len(text) for text, kept in zip(texts, is_kept.tolist(), strict=True) if kept)
                writers[split].append(ids, doc_offsets[:-1][is_kept])
    encoded = EncodedSplit(
        vocabulary_sha256=task.vocabulary.sha256,
        documents_read=read,
        documents_empty=empty,
        documents_with_invalid_utf8=invalid,
        text_bytes=text_bytes,
        parts={split: writer.describe() for split, writer in writers.items()},
    )
    write_durably(task.marker_path, encoded.model_dump_json().encode())
    return encoded


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    batch_bytes = 0
    for document in documents:
        batch.append(document)
        batch_bytes += len(document.text)
        if batch_bytes >= BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _by_split(batch: list[Document], validation_fraction: float) -> dict[Split, list[bytes]]:
    texts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for document in batch:
        texts[assign_split(document.text, validation_fraction)].append(document.text)
    return texts


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

    def append(self, ids: TokenIds, starts: Offsets) -> None:
        for file, hasher, values in (
            (self.tokens_file, self.tokens_hash, ids),
            (self.starts_file, self.starts_hash, starts + self.tokens),
        ):
            file.write(values.data)
            hasher.update(values.data)
        self.documents += len(starts)
        self.tokens += len(ids)

    def describe(self) -> EncodedPart:
        return EncodedPart(
            documents=self.documents,
            document_tokens=self.tokens - BOS_AND_EOS * self.documents,
            tokens_xxh3=self.tokens_hash.hexdigest(),
            starts_xxh3=self.starts_hash.hexdigest(),
        )
