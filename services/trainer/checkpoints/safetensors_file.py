"""Safetensors files of a checkpoint, whose headers name the run, step, layout and rank that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import ValidationError
from torch import Tensor

from services.common.artifacts.checkpoint import ShardOrigin, explain_origins
from services.common.artifacts.files import describe_file
from services.common.artifacts.manifest import FileEntry
from services.common.errors import ArtifactError
from services.common.input.files import unreadable

ORIGIN = "millrace_origin"
"""The only key of a header's metadata, with the `ShardOrigin` as JSON: safetensors writes several keys in random order,
but equal states must have equal bytes.
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
    path = folder / file
    try:
        with safetensors.safe_open(path, "pt") as tensors:
            found = ShardOrigin.model_validate_json((tensors.metadata() or {})[ORIGIN])
            if found != origin:
                raise ArtifactError(
                    f"{path}: is a shard of another state than the manifest's: {explain_origins(found, origin)}. "
                    f"Restore the checkpoint from a copy, or move its folder away: the run continues from the one "
                    f"before."
                )
            yield tensors
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, ValidationError) as error:
        raise ArtifactError(f"{path}: Millrace did not write it: its header has no valid {ORIGIN}.") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error
