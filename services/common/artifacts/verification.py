"""Verifies an artifact of any size: the nodes of a stage share its files as tasks of the launcher.

Each file is read by one node. An artifact of n files makes n / FILES_PER_TASK tasks, and as many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from services.common.artifacts.corpus import SPLITS, CorpusManifest, CorpusPayload, Split
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


class FileTask(NamedTuple):
    """The files that a task verifies."""

    folder: Path
    level: Level
    entries: tuple[FileEntry, ...]


class RowTask(NamedTuple):
    """The shards of a split, and its tail, whose rows a task verifies."""

    folder: Path
    corpus: CorpusPayload
    split: Split
    numbers: range


def verify_artifact(folder: Path, manifest: Manifest, launcher: Launcher) -> None:
    """Check an artifact's files on all nodes of the launcher, and of a corpus also its rows and its vocabulary.

    Raises `ArtifactError` for damage, and `DeviceError` without a library for the vocabulary.
    """
    verify_on_nodes(launcher, folder, manifest, "provenance")
    if isinstance(manifest, CorpusManifest):
        verify_rows_on_nodes(launcher, folder, manifest.corpus)
        _verify_vocabulary(folder, manifest)


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
    files = manifest.files
    starts = range(0, len(files), FILES_PER_TASK)
    tasks = [FileTask(folder, level, files[start : start + FILES_PER_TASK]) for start in starts]

    def damages() -> Iterator[str]:
        for index, found in launcher.map_on_nodes(_verify_files, tasks, TASKS_PER_NODE):
            advance(total_bytes(tasks[index].entries))
            yield from found

    require_undamaged(folder, len(files), damages())


def _verify_files(task: FileTask) -> list[str]:
    return list(find_damages(task.folder, task.entries, task.level))


def verify_rows_on_nodes(launcher: Launcher, folder: Path, corpus: CorpusPayload) -> None:
    """Read all rows of a corpus on all nodes of the launcher, with one map at a time in each task.

    Raises `ArtifactError` for a row that does not fit its check, an id outside the vocabulary, checks of another corpus
    than the manifest's, and another number of documents than the manifest says.
    """
    small = corpus.without_digests()  # a task would else carry those of the whole corpus
    for split in SPLITS:
        numbers, documents = range(corpus.num_shards(split) + 1), 0
        starts = range(0, len(numbers), FILES_PER_TASK)
        tasks = [RowTask(folder, small, split, numbers[start : start + FILES_PER_TASK]) for start in starts]
        for index, found in launcher.map_on_nodes(_verify_row_files, tasks, TASKS_PER_NODE):
            for number, (path, digest, begun) in zip(tasks[index].numbers, found, strict=True):
                documents += begun
                expected = corpus.splits[split].check_digests[number]
                if digest != expected:
                    raise ArtifactError(
                        f"{path}: its column check has the digest {digest}, the manifest says {expected}, so its rows "
                        f"are those of another corpus. {advise_verify(folder)}"
                    )
        require_documents(folder, corpus, split, documents)


def _verify_row_files(task: RowTask) -> list[tuple[Path, str, int]]:
    """Return of each file its path, the digest of its checks, and the number of documents that begin in it."""
    return [_verify_row_file(task, RowFile.map(task.folder, task.corpus, task.split, each)) for each in task.numbers]


def _verify_row_file(task: RowTask, file: RowFile) -> tuple[Path, str, int]:
    for row in file.rows:
        file.read(task.folder, task.split, row, task.corpus.sequence_length)
    require_own_ids(file.path, file.tokens, task.corpus.vocabulary.vocab_size)
    return file.path, digest_checks(file.checks), len(file.starts)


def _verify_vocabulary(folder: Path, manifest: CorpusManifest) -> None:
    """Raise `ArtifactError` unless the vocabulary's library reads its file and decodes BOS and EOS."""
    vocabulary = manifest.corpus.vocabulary
    path = locate(folder, vocabulary.path)
    try:
        # The images of the compiler and of the head have no library of vocabularies, and Pants leaves this package out.
        from services.common.vocabularies.codec import load_codec  # noqa: PLC0415  # pants: no-infer-dep

        codec = load_codec(path, vocabulary)
    except ImportError as error:
        raise DeviceError(
            f"{path}: no library for a {vocabulary.kind} tokenizer ({error}). Verify the corpus in the image of the "
            f"tokenizer or of the trainer."
        ) from error
    try:
        codec.decode([each for each in (vocabulary.bos_id, vocabulary.eos_id) if each is not None])
    except (LookupError, ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{path}: does not have BOS {vocabulary.bos_id} and EOS {vocabulary.eos_id} of the manifest: {error}. "
            f"Move the corpus away and run the tokenizer stage to rebuild it."
        ) from error
