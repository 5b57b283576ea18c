"""The task of a worker: it encodes the documents of one partition to files in the scratch folder.

For each split a task writes a file of tokens and a file of the positions where documents begin, and last a marker. A
partition has a key: the hash of all that decides its bytes. So the partition of a corpus with other inputs, whose
command was stopped, is used again where its own files are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.artifacts.corpus import SPLITS, BadFile, SourceSplitCounts, Split, Vocabulary
from services.common.artifacts.manifest import ManifestModel
from services.common.recipe.schema import Corpus, Recipe, fingerprint
from services.tokenizer.corpus_inputs import CONTENT_VERSION
from services.tokenizer.document_hashes import are_for_training, are_for_validation
from services.tokenizer.duplicates import Duplicates
from services.tokenizer.encoding.encoder import Offsets, TokenIds
from services.tokenizer.encoding.encoder_choice import load_encoder, reference_name
from services.tokenizer.partition_plan import Partitions, PlanFolder
from services.tokenizer.sources.bad_rows import BadRows, add_up
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
    folder: Path
    """Folder of the encoded partitions."""
    recipe: Recipe
    vocabulary_path: Path
    vocabulary: Vocabulary
    duplicates: Duplicates | None = None
    """The exact duplicates, which are dropped; None to keep them."""
    others: tuple[Path, ...] = ()
    """Folders of encoded partitions that commands for other inputs have left."""

    @property
    def marker_path(self) -> Path:
        return path_in_tree(self.folder, self.index, ".json")


class EncodedPart(ManifestModel):
    """The part of a partition that belongs to train or to validation."""

    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    tokens: int
    """Number of tokens, with BOS and EOS."""
    tokens_xxh3: str
    starts_xxh3: str


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
    """Documents by what became of them, with the names of `CorpusPayload`."""
    bad_files: tuple[BadFile, ...]
    files_without_text: tuple[str, ...]
    """Files, or parts of them, whose rows are all empty documents."""
    max_document_bytes: int
    parts: dict[Split, EncodedPart]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())


class EncodedPartitions:
    """Adds up results of encode tasks in any order, in 72 bytes for a partition. `partitions` are those of the plan."""

    def __init__(self, partitions: Partitions) -> None:
        self.sources: npt.NDArray[np.int32] = partitions["source"]
        self._is_first_pass: npt.NDArray[np.bool_] = partitions["pass_number"] == 0
        self.encoders: set[str] = set()
        self.counts: Counter[str] = Counter(documents_repeated=0)
        self.documents, self.text_bytes, self._tokens = (
            {split: np.zeros(len(partitions), np.int64) for split in SPLITS} for _ in range(3)
        )
        self.duplicates = np.zeros(len(partitions), np.int64)
        self._bad_files: dict[int, tuple[BadFile, ...]] = {}
        self.files_without_text = set[str]()
        self._text_digests = np.zeros((len(partitions), 16), np.uint8)

    def add(self, index: int, encoded: EncodedPartition) -> None:
        """Add the result of the encode task of partition `index`."""
        self.encoders.add(encoded.encoder)
        self._text_digests[index] = np.frombuffer(bytes.fromhex(encoded.text_xxh3), np.uint8)
        self.files_without_text.update(encoded.files_without_text)
        if self._is_first_pass[index]:
            self.counts.update(encoded.counts)
            self.duplicates[index] = encoded.counts.get("documents_duplicate", 0)
            if encoded.bad_files:
                self._bad_files[index] = encoded.bad_files
        else:
            self.counts["documents_checked"] += encoded.counts["documents_checked"]
            self.counts["documents_repeated"] += sum(part.documents for part in encoded.parts.values())
        for split, part in encoded.parts.items():
            self.documents[split][index] = part.documents
            self.text_bytes[split][index] = part.text_bytes
            self._tokens[split][index] = part.tokens

    @property
    def bad_files(self) -> list[BadFile]:
        """The files with bad rows, each row counted in the first pass over its source; the worst file is first."""
        return add_up(chain.from_iterable(self._bad_files[index] for index in sorted(self._bad_files)))

    def tokens(self, split: Split) -> npt.NDArray[np.int64]:
        """Return the number of tokens of every partition in a split, with BOS and EOS."""
        return self._tokens[split]

    def totals(self, split: Split, source: int | None = None) -> SourceSplitCounts:
        """Return the sums of a split over all partitions, or over those of one source."""
        is_own = slice(None) if source is None else self.sources == source
        return SourceSplitCounts(
            documents=int(self.documents[split][is_own].sum()),
            tokens=int(self.tokens(split)[is_own].sum()),
            text_bytes=int(self.text_bytes[split][is_own].sum()),
        )

    def text_digest(self, source: int) -> str:
        """Return a hash of the documents of a source, as they were read, in the order of the corpus."""
        return xxhash.xxh3_128_hexdigest(self._text_digests[(self.sources == source) & self._is_first_pass].tobytes())


def tokens_path(folder: Path, partition: int, split: Split) -> Path:
    """Return the path of the tokens that a partition has in a split."""
    return path_in_tree(folder, partition, f".{split}.tokens")


def starts_path(folder: Path, partition: int, split: Split) -> Path:
    """Return the path of the positions in the tokens of a partition at which documents begin."""
    return path_in_tree(folder, partition, f".{split}.starts")


def _key_path(folder: Path, key: str) -> Path:
    """Return the path of the file that has the number of the partition with this key."""
    return folder / f"key-{key[:2]}" / key


def encode_partition(task: EncodeTask) -> tuple[EncodedPartition, bool]:
    """Return the encoded partition, and whether this call has encoded it. Two calls write the same bytes."""
    partition = PlanFolder(task.plan).read_partition(task.index)
    none = np.empty(0, np.int64)
    duplicates = task.duplicates.read(partition.first_pass_index) if task.duplicates else none
    key = _key_of(task, partition, duplicates)
    done = _read_done(task, key) or _adopt(task, key)
    return (done, False) if done else (_encode(task, partition, duplicates, key), True)


def _key_of(task: EncodeTask, partition: InputPartition, duplicates: npt.NDArray[np.int64]) -> str:
    """Return the hash of all that decides the bytes of an encoded partition but bad rows: see `_is_usable`."""
    corpus = task.recipe.corpus
    settings = [
        CONTENT_VERSION,
        task.vocabulary.model_dump(mode="json"),
        reference_name(task.vocabulary),
        task.recipe.tokenizer.encoder,
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


def _read_done(task: EncodeTask, key: str) -> EncodedPartition | None:
    """Return the result of a task that was run before, or None when its files are incomplete or of other bytes."""
    done = read_whole_partition(task.folder, task.index)
    return done if done and _is_usable(done, task, key) else None


def _is_usable(done: EncodedPartition, task: EncodeTask, key: str) -> bool:
    """Return whether the task would write the same bytes and find the same bad rows."""
    corpus = task.recipe.corpus
    if done.bad_files and (corpus.bad_rows != "skip" or corpus.max_document_bytes != done.max_document_bytes):
        return False
    return done.key == key and corpus.max_document_bytes >= done.max_document_bytes


def _adopt(task: EncodeTask, key: str) -> EncodedPartition | None:
    """Return the partition of this key from a command for other inputs, whose files are linked; None without one.

    The files are never changed in place, and the other command may remove its own names of them at any time.
    """
    for folder in task.others:
        with suppress(OSError, ValueError):  # some file systems have no links
            index = int(_key_path(folder, key).read_bytes())
            marker = EncodedPartition.model_validate_json(path_in_tree(folder, index, ".json").read_bytes())
            if not _is_usable(marker, task, key):
                continue
            task.marker_path.parent.mkdir(exist_ok=True)
            for split, path_of in product(SPLITS, (tokens_path, starts_path)):
                target = path_of(task.folder, task.index, split)
                target.unlink(missing_ok=True)
                target.hardlink_to(path_of(folder, index, split))
            _write_markers(task, marker.model_copy(update={"index": task.index}))
            return _read_done(task, key)
    return None


def _write_markers(task: EncodeTask, encoded: EncodedPartition) -> None:
    """Write the marker of a partition whose files are written, and then where it is found by its key."""
    write_marker(task.marker_path, encoded)
    path = _key_path(task.folder, encoded.key)
    path.parent.mkdir(exist_ok=True)
    with write_file(path) as file:
        file.write(str(task.index).encode())


def read_whole_partition(folder: Path, index: int, splits: Collection[Split] = SPLITS) -> EncodedPartition | None:
    """Return the result of the task that encoded a partition, or None when its marker or a file is not whole.

    The partition's files of these splits are read and compared with the checksums in the marker.
    """

    def checksums(done: EncodedPartition) -> dict[Path, str]:
        tokens = {tokens_path(folder, index, split): done.parts[split].tokens_xxh3 for split in splits}
        return tokens | {starts_path(folder, index, split): done.parts[split].starts_xxh3 for split in splits}

    done = read_marker(path_in_tree(folder, index, ".json"), EncodedPartition, checksums)
    return done if done and done.index == index else None


def _encode(
    task: EncodeTask, partition: InputPartition, duplicates: npt.NDArray[np.int64], key: str
) -> EncodedPartition:
    corpus = task.recipe.corpus
    encoder = load_encoder(task.vocabulary_path, task.vocabulary, task.recipe.tokenizer)
    task.marker_path.parent.mkdir(exist_ok=True)
    text_hash, bad_rows, counts = _TextHash(), BadRows(corpus.bad_rows), Counter[str]()
    with ExitStack() as stack:
        writers = {split: _PartWriter(task, split, stack) for split in SPLITS}
        for batch in read_documents(partition.file_ranges, corpus.invalid_utf8, corpus.max_document_bytes, bad_rows):
            text_hash.update(batch)
            wanted, is_for_validation = _select(batch, corpus, partition, duplicates, counts)
            ids, offsets = encoder.encode(wanted)
            is_kept = np.diff(offsets) > 0
            counts["documents_empty"] += len(wanted) - int(is_kept.sum())
            writers["validation"].append(ids, offsets, wanted.sizes, is_kept & is_for_validation)
            writers["train"].append(ids, offsets, wanted.sizes, is_kept & ~is_for_validation)
    counts["documents_checked"] = encoder.take_documents_checked()
    encoded = EncodedPartition(
        index=task.index,
        key=key,
        encoder=encoder.name,
        text_xxh3=text_hash.hexdigest(),
        counts=dict(counts),
        bad_files=bad_rows.files(),
        files_without_text=tuple(bad_rows.without_text),
        max_document_bytes=corpus.max_document_bytes,
        parts={split: writer.describe() for split, writer in writers.items()},
    )
    _write_markers(task, encoded)
    return encoded


def _select(
    batch: TextBatch,
    corpus: Corpus,
    partition: InputPartition,
    duplicates: npt.NDArray[np.int64],
    counts: Counter[str],
) -> tuple[TextBatch, npt.NDArray[np.bool_]]:
    """Return the documents that enter the corpus, and which of them are for validation. Count the others."""
    read = counts["documents_read"]
    is_too_short = batch.sizes < corpus.min_document_bytes
    is_duplicate = np.zeros(len(batch), np.bool_)
    is_duplicate[duplicates[slice(*np.searchsorted(duplicates, [read, read + len(batch)]))] - read] = True
    left = batch.select(~(is_too_short | is_duplicate))
    is_for_validation = are_for_validation(left, corpus.validation_fraction)
    is_wanted = are_for_training(left, corpus.sources[partition.source].weight, partition.pass_number)
    # All of them, once and whatever the weight: losses of two mixtures are compared on the same documents.
    is_wanted[is_for_validation] = partition.pass_number == 0
    wanted = left.select(is_wanted)
    counts["documents_read"] += len(batch)
    counts["documents_with_invalid_utf8"] += batch.num_repaired
    counts["documents_too_short"] += int(is_too_short.sum())
    counts["documents_duplicate"] += int(is_duplicate.sum())
    counts["documents_not_sampled"] += len(left) - len(wanted)
    return wanted, is_for_validation[is_wanted]


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


class _PartWriter:
    """Writes the two files of a part, counts its documents, their bytes and tokens, and hashes the files."""

    def __init__(self, task: EncodeTask, split: Split, stack: ExitStack) -> None:
        """Open the files, which `stack` closes."""
        self._tokens_file = stack.enter_context(write_file(tokens_path(task.folder, task.index, split)))
        self._starts_file = stack.enter_context(write_file(starts_path(task.folder, task.index, split)))
        self._tokens_hash, self._starts_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._documents = self._text_bytes = self._tokens = 0

    def append(
        self, ids: TokenIds, offsets: Offsets, sizes: npt.NDArray[np.int64], is_wanted: npt.NDArray[np.bool_]
    ) -> None:
        """Append each marked document i: `ids[offsets[i]:offsets[i + 1]]`, of `sizes[i]` bytes of text."""
        self._text_bytes += int(sizes[is_wanted].sum())
        borders = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False))
        for first, last in borders.reshape(-1, 2).tolist():  # consecutive documents are written at once
            run = ids[offsets[first] : offsets[last]]
            self._write(self._tokens_file, self._tokens_hash, run)
            self._write(self._starts_file, self._starts_hash, offsets[first:last] - offsets[first] + self._tokens)
            self._documents += last - first
            self._tokens += len(run)

    @staticmethod
    def _write(file: BinaryIO, hasher: xxhash.xxh3_128, values: npt.NDArray[Any]) -> None:
        file.write(values.data)
        hasher.update(values.data)

    def describe(self) -> EncodedPart:
        return EncodedPart(
            documents=self._documents,
            text_bytes=self._text_bytes,
            tokens=self._tokens,
            tokens_xxh3=self._tokens_hash.hexdigest(),
            starts_xxh3=self._starts_hash.hexdigest(),
        )
