"""Safetensors files of a checkpoint, whose headers name the run, step, layout and rank that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import ValidationError
from torch import Tensor

from services.common.artifacts.checkpoint import ShardOrigin, explain_origins
from services.common.artifacts.files import describe_file, locate
from services.common.artifacts.manifest import FileEntry
from services.common.errors import ArtifactError
from services.common.input.files import InputFileError, require_regular_file, unreadable
from services.common.process.limits import explain_lack

ORIGIN = "millrace_origin"
"""Key of a header's metadata with the `ShardOrigin` as JSON. It is the only key: safetensors writes several keys in
random order, but equal states must have equal bytes.
"""


def write_tensors(folder: Path, file: str, origin: ShardOrigin, content: dict[str, Tensor]) -> FileEntry:
    """Write tensors, and return the file's entry for the manifest once the bytes are on disk."""
    # Through a Python file: safetensors' own writer reports a full disk without its errno.
    with (folder / file).open("wb") as opened:
        opened.write(safetensors.torch.save(content, metadata={ORIGIN: origin.model_dump_json()}))
    return describe_file(folder, file)


@contextmanager
def open_tensors(folder: Path, file: str, origin: ShardOrigin) -> Iterator[Any]:
    """Open a file whose tensors are mapped, and read on demand.

    Raises `ArtifactError` if it cannot be read, or if its header names another origin.
    """
    path = locate(folder, file)
    try:
        require_regular_file(path, folder)
        with safetensors.safe_open(path, "pt") as tensors:
            _require_origin(path, tensors.metadata(), origin)
            yield tensors
    except InputFileError as error:
        raise unreadable(path, error) from error
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, MemoryError) as error:
        raise explain_lack(error, path) or ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error


def _require_origin(path: Path, metadata: Mapping[str, str] | None, expected: ShardOrigin) -> None:
    try:
        found = ShardOrigin.model_validate_json((metadata or {})[ORIGIN])
    except KeyError:
        raise ArtifactError(
            f"{path}: its header does not name its run and step ({ORIGIN}), so Millrace did not write it. "
            f"Restore the checkpoint from a copy."
        ) from None
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: its header does not name its run and step in a readable form: {error.errors()[0]['msg']}. "
            f"Restore the checkpoint from a copy."
        ) from error
    if found != expected:
        raise ArtifactError(
            f"{path}: is a shard of another state than the manifest's: {explain_origins(found, expected)}. Restore "
            f"the checkpoint from a copy, or move its folder away: then the run continues from the one before."
        )
