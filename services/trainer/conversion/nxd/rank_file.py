"""Reads a file that a rank of NxD wrote with `torch.save`, without executing code from the file.

With `use_xser` a tensor in the file is a reference to a file of its own: `NAME.pt.tensors/tensor_7.pt`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.errors import ArtifactError
from services.trainer.conversion.saved_tensors import load_saved, require_dense

_NAME = re.compile(r"dp_rank_(\d{2,4})_tp_rank_(\d{2,4})_pp_rank_(\d{2,4})\.pt")
_REFERENCE = "torch_xla.utils.serialization.TensorReference"


class TensorReference:
    """Stands in for torch_xla's class of that name, whose only attribute is the number of the tensor's file."""

    tid: object = None


def rank_file_name(data_parallel_rank: int, tensor_parallel_rank: int, pipeline_parallel_rank: int) -> str:
    return (
        f"dp_rank_{data_parallel_rank:02d}_tp_rank_{tensor_parallel_rank:02d}_pp_rank_{pipeline_parallel_rank:02d}.pt"
    )


def count_ranks(folder: Path) -> tuple[int, int, int]:
    """Return the numbers of data-, tensor- and pipeline-parallel ranks that have files in a folder.

    Raises `ArtifactError` if the file of a rank is missing.
    """
    names = {path.name for path in folder.iterdir()}
    numbers = [tuple(map(int, match.groups())) for name in names if (match := _NAME.fullmatch(name))]
    found = {ranks for ranks in numbers if rank_file_name(*ranks) in names}
    if not found:
        raise ArtifactError(
            f"{folder}: has no {rank_file_name(0, 0, 0)}, only {', '.join(sorted(names)[:3]) or 'no files'}. "
            f"Expected a checkpoint of `nxd.save_checkpoint` without expert parallelism."
        )
    sizes = [max(along) + 1 for along in zip(*found, strict=True)]
    num_missing = math.prod(sizes) - len(found)
    if num_missing:
        missing = (ranks for ranks in itertools.product(*map(range, sizes)) if ranks not in found)
        raise ArtifactError(
            f"{folder}: {num_missing:,} of the {math.prod(sizes):,} ranks have no file: "
            f"{', '.join(rank_file_name(*ranks) for ranks in itertools.islice(missing, 3))}. Copy the whole folder."
        )
    return sizes[0], sizes[1], sizes[2]


def load_rank_file(path: Path) -> dict[Any, Any]:
    """Load a file's dictionary, whose tensors stay on disk until they are used.

    Raises `ArtifactError` if the file is damaged or holds no dictionary.
    """
    content = _load(path, _named_folder(path))
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a {type(content).__name__}, expected a dictionary of tensors.")
    return content


def resolve(path: Path, name: object, value: object) -> Tensor:
    """Return the tensor of an entry of a rank's file, in that file or beside it; it stays on disk until it is used.

    Raises `ArtifactError` unless it is a dense tensor with values.
    """
    if isinstance(value, TensorReference):
        if type(value.tid) is not int or not 0 <= value.tid < 2**63:
            raise ArtifactError(f"{path}: {name} refers to a tensor's file without a number from 0 on.")
        file = path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt"
        if not os.path.lexists(file):
            raise ArtifactError(
                f"{file}: is missing, but has {name}. The copy is incomplete, or the run had "
                f"avoid_saving_lower_precision_weights: then load the checkpoint in NxD and save it without the option."
            )
        value = _load(file, _named_folder(path))
    return require_dense(path, name, value)


def _named_folder(path: Path) -> Path:
    """Return the checkpoint's folder from the path of a rank's file. No link may lead out of that folder."""
    return path.parent.parent


def _load(path: Path, within: Path) -> object:
    with torch.serialization.safe_globals([(TensorReference, _REFERENCE)]):
        return load_saved(path, within, "an NxD checkpoint")
