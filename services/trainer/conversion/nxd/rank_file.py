"""A file that a rank of NxD writes with `torch.save`, read without running anything that it says.

With `use_xser` a tensor in it is a reference to a file of its own: `NAME.pt.tensors/tensor_7.pt`.
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
from services.common.input.files import reading_inputs, require_regular_file, unreadable
from services.common.process.limits import explain_lack

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
    """Data-, tensor- and pipeline-parallel ranks that have a file here. Raises `ArtifactError` where one lacks its."""
    names = {path.name for path in folder.iterdir()}
    numbers = [tuple(map(int, match.groups())) for name in names if (match := _NAME.fullmatch(name))]
    found = {ranks for ranks in numbers if rank_file_name(*ranks) in names}
    if not found:
        raise ArtifactError(
            f"{folder}: has no {rank_file_name(0, 0, 0)}. It has {', '.join(sorted(names)[:3]) or 'nothing'}; of NxD's "
            f"checkpoints, those of `nxd.save_checkpoint` without expert parallelism are read."
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
    """Its dictionary, tensors on disk until they are used. Raises `ArtifactError` for what is none, or damaged."""
    content = _load(path, _named_folder(path))
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a {type(content).__name__}, expected a dictionary of tensors.")
    return content


def resolve(path: Path, name: object, value: object) -> Tensor:
    """The tensor of an entry of a rank's file, on disk until it is used, whether it is in that file or beside it.

    Raises `ArtifactError` unless it is a dense tensor with values.
    """
    if isinstance(value, TensorReference):
        if type(value.tid) is not int or not 0 <= value.tid < 2**63:
            raise ArtifactError(f"{path}: {name} is no tensor of a number from 0 on, as its file should have.")
        file = path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt"
        if not os.path.lexists(file):
            raise ArtifactError(
                f"{file}: is missing, and has {name}. The copy is not complete, or the run had "
                f"avoid_saving_lower_precision_weights: then load and save the checkpoint once in NxD without it."
            )
        value = _load(file, _named_folder(path))
    if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
        raise ArtifactError(f"{path}: {name} is a {type(value).__name__}, expected a dense tensor.")
    if value.device.type != "cpu":
        raise ArtifactError(
            f"{path}: {name} is on the device `{value.device}`, where it has no values, expected a tensor with values. "
            f"The run saved its model before it had any: use the checkpoint of another step."
        )
    return value.detach().resolve_conj().resolve_neg()


def _named_folder(path: Path) -> Path:
    """The checkpoint's folder, of the path of a rank's file: what is read lies in it, whatever a link says."""
    return path.parent.parent


def _load(path: Path, within: Path) -> object:
    with reading_inputs(within):
        require_regular_file(path, within)
    try:
        with torch.serialization.safe_globals([(TensorReference, _REFERENCE)]):
            loaded: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return loaded
    except PermissionError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged pickle can raise anything
        if (lack := explain_lack(error, path)) is not None:
            raise lack from error
        # Before this torch advises to load the file without its protection.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0] or type(error).__name__
        raise ArtifactError(
            f"{path}: cannot be read as a file of torch.save with tensors alone: {reason}. It is damaged, or "
            f"no part of an NxD checkpoint; copy it again."
        ) from error
