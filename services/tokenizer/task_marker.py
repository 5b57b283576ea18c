"""Markers of tasks, by which a repeated command runs no task twice.

A task writes its files and last a marker: the JSON of its result, which has the checksums of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from services.common.artifacts.files import xxh3_of
from services.common.artifacts.manifest import ManifestModel
from services.common.input.files import read_file
from services.tokenizer.atomic_file import write_file

R = TypeVar("R", bound=ManifestModel)


def read_marker(
    path: Path, folder: Path, result_type: type[R], checksums: Callable[[R], Mapping[Path, str]]
) -> R | None:
    """Return the result in the marker at `path`, or None when the task has to run.

    A task runs when its marker is missing or of another form, or when a file is missing or has another checksum than
    `checksums` returns for the result. The marker lies below `folder`.
    """
    try:
        result = result_type.model_validate_json(read_file(path, folder))
        is_whole = all(xxh3_of(file) == checksum for file, checksum in checksums(result).items())
    except (FileNotFoundError, ValidationError):
        return None
    return result if is_whole else None


def write_marker(path: Path, result: ManifestModel) -> None:
    """Write a task's result to `path`, after all files of the task."""
    with write_file(path) as file:
        file.write(result.model_dump_json().encode())
