"""Verifies an artifact of any size: the nodes of a stage share its files as tasks of the launcher.

Each file is read by one node. An artifact of n files makes n / FILES_PER_TASK tasks, and as many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.corpus import SPLITS, CorpusPayload, Split, shard_path, tail_path
from services.common.artifacts.corpus_rows import advise_verify, require_documents, verify_row_file
from services.common.artifacts.files import Damage, Level, find_damages, require_undamaged, total_bytes
from services.common.artifacts.manifest import FileEntry, Manifest
from services.common.errors import ArtifactError
from services.common.launch.launcher import Launcher

FILES_PER_TASK = 32
TASKS_PER_NODE = 4
"""Tasks that a node runs at a time. A task reads in 4 threads, so a node has 16 reads of the file system under way."""


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
        FileSlice(folder, entries[begin : begin + FILES_PER_TASK], level)
        for begin in range(0, len(entries), FILES_PER_TASK)
    ]

    def damages() -> Iterator[Damage]:
        for index, found in launcher.map_on_nodes(verify_slice, slices, TASKS_PER_NODE):
            advance(total_bytes(slices[index].entries))
            yield from found

    require_undamaged(folder, len(entries), damages())


def verify_slice(files: FileSlice) -> list[Damage]:
    """Return the damages of a task's files."""
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

    Raises what `verify_row_file` raises, and `ArtifactError` for checks that do not fit the manifest or for another
    number of documents than the manifest says.
    """
    geometry = corpus.without_digests()
    slices = [
        RowSlice(folder, geometry, split, numbers[begin : begin + FILES_PER_TASK])
        for split in SPLITS
        for numbers in [range(corpus.num_shards(split) + 1)]
        for begin in range(0, len(numbers), FILES_PER_TASK)
    ]
    documents = dict.fromkeys(SPLITS, 0)
    for index, found in launcher.map_on_nodes(verify_row_slice, slices, TASKS_PER_NODE):
        split = slices[index].split
        for number, (digest, begun) in zip(slices[index].numbers, found, strict=True):
            _require_own_checks(folder, corpus, split, number, digest)
            documents[split] += begun
    for split, begun in documents.items():
        require_documents(folder, corpus, split, begun)


def verify_row_slice(rows: RowSlice) -> list[tuple[str, int]]:
    """Return what `verify_row_file` returns for each file of a task."""
    return [verify_row_file(rows.folder, rows.corpus, rows.split, number) for number in rows.numbers]


def _require_own_checks(folder: Path, corpus: CorpusPayload, split: Split, number: int, found: str) -> None:
    expected = corpus.splits[split].check_digests[number]
    if found != expected:
        path = tail_path(split) if number == corpus.num_shards(split) else shard_path(split, number)
        raise ArtifactError(
            f"{folder / path}: its column check has the digest {found}, the manifest says {expected}, so its rows are "
            f"those of another corpus. {advise_verify(folder)}"
        )
