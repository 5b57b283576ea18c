"""The float32 weights of NxD's ZeRO-1 optimizer, which saves them where `use_master_weights_in_ckpt` says so.

Each data-parallel rank has some rows of each tensor, filled up with zeros so that all have as many; the optimizer knows
tensors by number, in the order in which the run's script grouped them, which is saved nowhere. So a number's tensor is
found by its values: rounded, they are the weights in `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.errors import ArtifactError
from services.trainer.nxd.rank_file import count_ranks, load_rank_file, rank_file_name, resolve

OPTIMIZER = "optim"
MASTERS, SHAPES = "sharded_master_weights", "shape_info"
RELATIVE_TOLERANCE = 2.0**-7
"""Of bfloat16 by its spacing: rounding is to the nearest, or stochastic, which can take the next one."""


def read_masters(
    folder: Path, rank: tuple[int, int], weights: Mapping[str, Tensor]
) -> dict[str, Callable[[], Tensor]] | None:
    """Functions that read a rank's masters, by the names of its weights; None where the checkpoint has none.

    `rank` is that of the pipeline and of the tensor axis. Raises `ArtifactError` for masters that are not complete, or
    not those of the weights.
    """
    optimizer, (stage, index) = folder / OPTIMIZER, rank
    if not (optimizer / rank_file_name(0, index, stage)).exists():
        return None
    num_data, _, _ = count_ranks(optimizer)
    paths = [optimizer / rank_file_name(number, index, stage) for number in range(num_data)]
    contents = [load_rank_file(path) for path in paths]
    if MASTERS not in contents[0]:
        return None
    remaining, found = dict(weights), {}
    for number, shape in contents[0].get(SHAPES, {}).items():
        shards = [partial(_shard, path, content, number) for path, content in zip(paths, contents, strict=True)]
        first = shards[0]()
        name = next((name for name, weight in remaining.items() if _is_rounded(first, weight, shape)), None)
        if name is None:
            raise ArtifactError(
                f"{paths[0]}: its tensor {number}, {list(shape)}, is the master of no weight in `model`. Both were not "
                f"saved at one step; move `{OPTIMIZER}` away to import the weights in `model`."
            )
        found[name] = partial(_join, paths[0], name, remaining.pop(name), shards)
    if remaining:
        raise ArtifactError(f"{paths[0]}: has no master of {', '.join(list(remaining)[:3])}.")
    return found


def _shard(path: Path, content: Mapping[str, Any], number: int) -> Tensor:
    masters = content.get(MASTERS)
    if not isinstance(masters, dict) or number not in masters:
        raise ArtifactError(f"{path}: has no master of tensor {number}, which other ranks have.")
    master = resolve(path, number, masters[number])
    if master.dtype != torch.float32:
        raise ArtifactError(f"{path}: the master of tensor {number} is {master.dtype}, expected float32.")
    return master


def _is_rounded(shard: Tensor, weight: Tensor, shape: tuple[int, ...]) -> bool:
    """Are these the first rows of the weight's master, and padding?"""
    return tuple(shape) == tuple(weight.shape) == (weight.shape[0], *shard.shape[1:]) and _are_near(shard, weight)


def _are_near(master: Tensor, weight: Tensor) -> bool:
    rows = min(len(master), len(weight))
    smallest = torch.finfo(torch.float32).tiny  # a device may have none below it
    return torch.allclose(master[:rows], weight[:rows].float(), rtol=RELATIVE_TOLERANCE, atol=smallest)


def _join(path: Path, name: str, weight: Tensor, shards: list[Callable[[], Tensor]]) -> Tensor:
    master = torch.cat([shard() for shard in shards])
    padded = -(-len(weight) // len(shards)) * len(shards)
    if len(master) != padded or not _are_near(master, weight):
        raise ArtifactError(
            f"{path}: the masters of {name} on {len(shards)} data-parallel ranks are {list(master.shape)} in all, and "
            f"{list(weight.shape)} in `model`, or have other values. Files of data-parallel ranks are missing or mixed."
        )
    return master[: len(weight)]
