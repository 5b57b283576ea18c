"""Verifies an artifact of any size: the nodes of a stage share its files as tasks of the launcher.

Each file is read by one node. An artifact of n files makes n / FILES_PER_TASK tasks, and as many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.corpus import SPLITS, CorpusManifest, CorpusPayload, Split, shard_path, tail_path
from services.common.artifacts.corpus_rows import (
    RowFile,
    advise_verify,
    digest_checks,
    require_documents,
    require_own_ids,
)
from services.common.artifacts.files import Level, find_damages, locate, require_undamaged, total_bytes
from services.common.artifacts.manifest import FileEntry, Manifest
from services.common.errors import ArtifactError, DeviceError
from services.common.launch.launcher import Launcher

FILES_PER_TASK = 32
TASKS_PER_NODE = 4
"""Tasks that a node runs at a time. A task reads in 4 threads, so a node has 16 reads of the file system under way."""


def verify_artifact(folder: Path, manifest: Manifest, launcher: Launcher) -> None:
    """Check an artifact's files on all nodes of the launcher, and of a corpus also its rows and its vocabulary.

    Raises `ArtifactError` for damage, and `DeviceError` without a library for the vocabulary. All files are read twice,
    those of a corpus three times; the kernel's cache may have them from the second time on.
    """
    verify_on_nodes(launcher, folder, manifest, "provenance")
    if isinstance(manifest, CorpusManifest):
        verify_rows_on_nodes(launcher, folder, manifest.corpus)
        _verify_vocabulary(folder, manifest)


@dataclass(frozen=True)
class FileSlice:
    """The files that a task verifies."""

    folder: Path
    entries: tuple[FileEntry, ...]
    level: Level


def verify_on_nodes(
    launcher: Launcher,
    folder: Path,
    manifest: Manifest,
    level: Level = "full",
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Verify all files that the manifest lists, as `verify_files` does, on all nodes of the launcher.

    `advance` is called with the size of the files that a task has verified. Raises what `verify_files` raises, and
    `WorkersLost` where a node is lost meanwhile.
    """
    entries = manifest.files
    slices = [
        FileSlice(folder, entries[start : start + FILES_PER_TASK], level)
        for start in range(0, len(entries), FILES_PER_TASK)
    ]

    def damages() -> Iterator[str]:
        for index, found in launcher.map_on_nodes(_verify_slice, slices, TASKS_PER_NODE):
            advance(total_bytes(slices[index].entries))
            yield from found

    require_undamaged(folder, len(entries), damages())


def _verify_slice(files: FileSlice) -> list[str]:
    return list(find_damages(files.folder, files.entries, files.level))


@dataclass(frozen=True)
class RowSlice:
    """The shards of a split, or its tail, whose rows a task verifies."""

    folder: Path
    corpus: CorpusPayload
    """The payload without digests: a task would else carry those of the whole corpus."""
    split: Split
    numbers: range


def verify_rows_on_nodes(launcher: Launcher, folder: Path, corpus: CorpusPayload) -> None:
    """Read all rows of a corpus on all nodes of the launcher, with one map at a time in each task.

    Raises `ArtifactError` for a row that does not fit its check, an id outside the vocabulary, checks of another corpus
    than the manifest's, and another number of documents than the manifest says.
    """
    geometry = corpus.without_digests()
    slices = [
        RowSlice(folder, geometry, split, numbers[start : start + FILES_PER_TASK])
        for split in SPLITS
        for numbers in [range(corpus.num_shards(split) + 1)]
        for start in range(0, len(numbers), FILES_PER_TASK)
    ]
    documents = dict.fromkeys(SPLITS, 0)
    for index, found in launcher.map_on_nodes(_verify_row_slice, slices, TASKS_PER_NODE):
        split = slices[index].split
        for number, (digest, begun) in zip(slices[index].numbers, found, strict=True):
            documents[split] += begun
            expected = corpus.splits[split].check_digests[number]
            if digest != expected:
                path = tail_path(split) if number == corpus.num_shards(split) else shard_path(split, number)
                raise ArtifactError(
                    f"{folder / path}: its column check has the digest {digest}, the manifest says {expected}, so its "
                    f"rows are those of another corpus. {advise_verify(folder)}"
                )
    for split, begun in documents.items():
        require_documents(folder, corpus, split, begun)


def _verify_row_slice(rows: RowSlice) -> list[tuple[str, int]]:
    """Return of each file the digest of its checks, and the number of documents that begin in it."""
    return [_verify_row_file(rows.folder, rows.corpus, rows.split, number) for number in rows.numbers]


def _verify_row_file(folder: Path, corpus: CorpusPayload, split: Split, number: int) -> tuple[str, int]:
    file = RowFile.map(folder, corpus, split, number)
    for row in file.rows:
        file.read(folder, split, row, corpus.sequence_length)
    require_own_ids(file.path, file.tokens, corpus.vocabulary.vocab_size)
    return digest_checks(file.checks), len(file.starts)


def _verify_vocabulary(folder: Path, manifest: CorpusManifest) -> None:
    """Raise `ArtifactError` unless the vocabulary's library reads its file and decodes BOS and EOS, and `DeviceError`
    where that library is not installed.
    """
    vocabulary = manifest.corpus.vocabulary
    path = locate(folder, vocabulary.path)
    try:
        # The images of the compiler and of the head have no library of vocabularies, and Pants leaves this package out.
        from services.common.vocabularies.codec import load_codec  # noqa: PLC0415  # pants: no-infer-dep

        codec = load_codec(path, vocabulary)
    except ImportError as error:
        raise DeviceError(
            f"{path}: this environment cannot read a {vocabulary.kind} vocabulary ({error}). Verify the corpus in the "
            f"image of the tokenizer or of the trainer, which can."
        ) from error
    try:
        codec.decode([vocabulary.bos_id, vocabulary.eos_id])
    except (LookupError, ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{path}: does not have BOS {vocabulary.bos_id:,} and EOS {vocabulary.eos_id:,} of the manifest: {error}. "
            f"Move the corpus away and run the tokenizer stage to make it anew."
        ) from error
