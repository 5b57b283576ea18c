"""Verifies the files of an artifact of any size: the nodes of a stage share them as tasks of the launcher.

Each file is read once, by one node. An artifact of n files makes n / FILES_PER_TASK tasks, and as many messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.common.artifacts.files import Damage, Level, find_damages, require_undamaged, total_bytes
from services.common.artifacts.manifest import FileEntry, Manifest
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
