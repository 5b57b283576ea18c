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
from services.trainer.conversion.nxd.rank_file import count_ranks, load_rank_file, rank_file_name, resolve

OPTIMIZER = "optim"
MASTERS = "sharded_master_weights"
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
    if not optimizer.exists():
        return None
    num_data, _, _ = count_ranks(optimizer)
    paths = [optimizer / rank_file_name(number, index, stage) for number in range(num_data)]
    contents = [load_rank_file(path) for path in paths]
    if MASTERS not in contents[0]:
        return None
    remaining, found = dict(weights), dict[str, Callable[[], Tensor]]()
    for number in _masters(paths[0], contents[0]):
        shards: list[Callable[[], Tensor]] = [
            partial(_shard, path, content, number) for path, content in zip(paths, contents, strict=True)
        ]
        first = shards[0]()
        name = next((name for name, weight in remaining.items() if _is_rounded(first, weight, num_data)), None)
        if name is None:
            raise ArtifactError(
                f"{paths[0]}: its tensor {number}, {list(first.shape)}, is the master of no weight in `model` that has "
                f"none yet. Both were not saved at one step."
            )
        found[name] = partial(_join, paths[0], name, remaining.pop(name), shards)
    if remaining:
        raise ArtifactError(f"{paths[0]}: has no master of {', '.join(list(remaining)[:3])}.")
    return found


def _masters(path: Path, content: Mapping[str, Any]) -> dict[Any, Any]:
    masters = content.get(MASTERS)
    if not isinstance(masters, dict):
        raise ArtifactError(f"{path}: has no {MASTERS}, which other ranks have.")
    return masters


def _shard(path: Path, content: Mapping[str, Any], number: object) -> Tensor:
    masters = _masters(path, content)
    if number not in masters:
        raise ArtifactError(f"{path}: has no master of tensor {number}, which other ranks have.")
    master = resolve(path, number, masters[number])
    if master.dtype != torch.float32:
        raise ArtifactError(f"{path}: the master of tensor {number} is {master.dtype}, expected float32.")
    return master


def _is_rounded(shard: Tensor, weight: Tensor, num_data: int) -> bool:
    """Are these the first of the weight's rows, before rounding?"""
    return shard.shape == (-(-len(weight) // num_data), *weight.shape[1:]) and _are_near(shard, weight)


def _are_near(master: Tensor, weight: Tensor) -> bool:
    rows = min(len(master), len(weight))
    smallest = torch.finfo(torch.float32).tiny  # a device may have none below it
    return torch.allclose(master[:rows], weight[:rows].float(), rtol=RELATIVE_TOLERANCE, atol=smallest)


def _join(path: Path, name: str, weight: Tensor, readers: list[Callable[[], Tensor]]) -> Tensor:
    shards = [read() for read in readers]
    is_even = all(shard.shape == shards[0].shape for shard in shards)
    if not is_even or not _are_near(torch.cat(shards), weight):
        raise ArtifactError(
            f"{path}: the shards of {name}'s master on {len(shards)} data-parallel ranks are not the weight in `model` "
            f"before rounding. Files of several checkpoints were mixed."
        )
    return torch.cat(shards)[: len(weight)]
