"""Loads what `torch.save` wrote, without executing code from the file, and tells which tensors can be weights."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from services.common.errors import ArtifactError
from services.common.input.files import reading_inputs, require_regular_file, unreadable
from services.common.process.limits import explain_lack

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of weights: those whose values float32 holds exactly."""


def load_saved(path: Path, within: Path, part_of: str, content: IO[bytes] | None = None) -> object:
    """Load a file of `torch.save`, whose tensors stay on disk until they are used, or a part of the file: `content`.

    No link may lead out of the folder `within`. `part_of` is what the file belongs to, such as "an NxD checkpoint".
    Raises `ArtifactError` if the file is damaged.
    """
    if content is None:
        with reading_inputs(within):
            require_regular_file(path, within)
    try:
        loaded: object = torch.load(content or path, map_location="cpu", mmap=content is None, weights_only=True)
        return loaded
    except PermissionError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle can raise anything
        if (lack := explain_lack(error, path)) is not None:
            raise lack from error
        # The text before this advises to load the file without protection.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0] or type(error).__name__
        raise ArtifactError(
            f"{path}: cannot be read as a file of torch.save with nothing but tensors: {reason}. It is damaged, or not "
            f"a part of {part_of}; copy it again."
        ) from error


def require_dense(path: Path, name: object, value: object) -> Tensor:
    """Return a tensor without its gradient. Raises `ArtifactError` unless it is dense and has values."""
    if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
        raise ArtifactError(f"{path}: {name} is a {type(value).__name__}, expected a dense tensor.")
    if value.device.type != "cpu":
        raise ArtifactError(
            f"{path}: {name} is on the device `{value.device}` without values, expected a tensor with values. The run "
            f"saved its model before it had values: use the checkpoint of another step."
        )
    return value.detach().resolve_conj().resolve_neg()
