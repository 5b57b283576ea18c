"""Reads and writes checkpoints of NxD's `save_checkpoint` and `load_checkpoint` (neuronx-distributed 0.18).

The folder of a checkpoint's tag has:

    checkpoint, done            markers: the save has begun, the save has ended
    model/dp_rank_00_tp_rank_03_pp_rank_00.pt
    optim/dp_rank_17_tp_rank_03_pp_rank_00.pt

A run with `use_xser` saves each tensor in a file of its own, `NAME.pt.tensors/tensor_7.pt`. Only the float32 weights
are read of the optimizer's files; `scheduler.pt` and `user_content.pt` are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.common.errors import ArtifactError, RecipeError
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.hugging_face import require_finite, require_model, require_names
from services.trainer.conversion.nxd.layout import NxdLayout, rank_tensors

BEGUN, COMMITTED = "checkpoint", "done"
MODEL, OPTIMIZER = "model", "optim"
MASTERS = "sharded_master_weights"
RELATIVE_TOLERANCE = 2.0**-7
"""Spacing of bfloat16 relative to its values: stochastic rounding can round to either neighbor."""
_NAME = re.compile(r"dp_rank_(\d{2,4})_tp_rank_(\d{2,4})_pp_rank_(\d{2,4})\.pt")
_REFERENCE = "torch_xla.utils.serialization.TensorReference"

Loaded = TypeVar("Loaded")
Rank = tuple[int, int]
"""Ranks along the pipeline axis and the tensor axis."""
Masters = dict[str, Callable[[], Tensor]]
"""Functions that read a rank's float32 weights, by the names of its tensors."""


class TensorReference:
    """Stands in for torch_xla's class of that name, whose only attribute is the number of the tensor's file."""

    tid: int


class NxdWeights:
    """Joins the full weights of a committed checkpoint from the parts of its ranks.

    Raises `ArtifactError` unless the checkpoint is complete and of the model, and if copies of a tensor differ.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        if not (folder / COMMITTED).exists():
            raise ArtifactError(
                f"{folder}: has no file `{COMMITTED}`: its save did not finish, or its removal began. Use another tag."
            )
        _, self._num_tensor, self._num_pipeline = _count_ranks(folder / MODEL)
        ranks = {
            (stage, index): _load_weights(folder / MODEL / rank_file_name(0, index, stage))
            for stage in range(self._num_pipeline)
            for index in range(self._num_tensor)
        }
        self._folder, self._model, self._shapes = folder, model, parameter_shapes(model)
        self._layout = _find_layout(folder, ranks, model, self._num_tensor)
        self._tensors = rank_tensors(model, self._layout)
        self._require_model(ranks)
        masters = {rank: _read_masters(folder, rank, weights) for rank, weights in ranks.items()}
        self.has_masters = all(masters.values())
        if any(masters.values()) and not self.has_masters:
            raise ArtifactError(f"{folder / OPTIMIZER}: some ranks have masters and others have none.")
        self._readers = {
            rank: masters[rank] or {name: weight.float for name, weight in weights.items()}
            for rank, weights in ranks.items()
        }

    def read(self, name: str) -> Tensor:
        """Read a full parameter by Hugging Face's name, in float32: the optimizer's master if there is one."""
        weights = [
            self._join(nxd_name, stage, number)
            for nxd_name, parts in self._tensors.items()
            for number, part in enumerate(parts)
            if part.name == name
            for stage in range(self._num_pipeline)
            if nxd_name in self._readers[stage, 0]
        ]
        if not all(torch.equal(weight, weights[0]) for weight in weights[1:]):
            raise ArtifactError(f"{self._folder}: the copies of {name} in several tensors or stages differ.")
        return require_finite(self._folder, name, weights[0])

    def _join(self, nxd_name: str, stage: int, number: int) -> Tensor:
        parts = self._tensors[nxd_name]
        rows = [part.shape(self._shapes[part.name], self._layout)[0] for part in parts]
        tensors = [self._readers[stage, index][nxd_name]() for index in range(self._num_tensor)]
        try:
            slices = [tensor.split(rows)[number] for tensor in tensors]
            return parts[number].join(slices, self._layout, self._model).contiguous()
        except ValueError as error:
            raise ArtifactError(
                f"{self._folder}: {nxd_name} has copies of one tensor on several ranks, and {error}. The run was not "
                f"consistent, its key-value heads are in trn2's order, or files of several checkpoints were mixed."
            ) from error

    def _require_model(self, ranks: Mapping[Rank, Mapping[str, Tensor]]) -> None:
        """Raise `ArtifactError` unless all ranks of a stage have its names, with the types and shapes of the model."""
        require_names(self._folder, {name: 0 for weights in ranks.values() for name in weights}, self._tensors)
        for (stage, index), weights in ranks.items():
            expected = {name: self._rank_shape(name) for name in ranks[stage, 0]}
            found = {name: (weight.dtype, weight.shape) for name, weight in weights.items()}
            require_model(self._folder / MODEL / rank_file_name(0, index, stage), found, expected)

    def _rank_shape(self, nxd_name: str) -> torch.Size:
        shapes = [part.shape(self._shapes[part.name], self._layout) for part in self._tensors[nxd_name]]
        return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:]))


def write_nxd_model(folder: Path, model: Model, layout: NxdLayout, read: Callable[[str], Tensor]) -> None:
    """Write a checkpoint's `model`, and its markers. One rank's tensors and one parameter are in memory.

    Raises `RecipeError` if NxD cannot split the model by this layout.
    """
    if misfit := layout.find_misfit(model):
        raise RecipeError(f"NxD cannot split this model: {misfit}. Change the options of `export --format nxd`.")
    (folder / MODEL).mkdir()
    for index in range(layout.tensor_parallel_size):
        state = {
            name: torch.cat([part.split(read(part.name), layout, model)[index] for part in parts])
            for name, parts in rank_tensors(model, layout).items()
        }
        with (folder / MODEL / rank_file_name(0, index, 0)).open("wb") as file:  # a path's errors are no OSError
            torch.save(state, file)
    for marker in (BEGUN, COMMITTED):
        (folder / marker).write_text("1", encoding="ascii")


def rank_file_name(data_parallel_rank: int, tensor_parallel_rank: int, pipeline_parallel_rank: int) -> str:
    return (
        f"dp_rank_{data_parallel_rank:02d}_tp_rank_{tensor_parallel_rank:02d}_pp_rank_{pipeline_parallel_rank:02d}.pt"
    )


def _count_ranks(folder: Path) -> tuple[int, int, int]:
    """Return the numbers of data-, tensor- and pipeline-parallel ranks that have files in a folder."""
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    if not matches:
        raise ArtifactError(f"{folder}: has no {rank_file_name(0, 0, 0)}, as `nxd.save_checkpoint` writes it.")
    data, tensor, pipeline = (max(int(match[axis]) for match in matches) + 1 for axis in (1, 2, 3))
    expected = math.prod((data, tensor, pipeline))
    if len(matches) != expected:
        raise ArtifactError(
            f"{folder}: has files of {len(matches):,} ranks, expected {expected:,} ({data} data-, {tensor} tensor- and "
            f"{pipeline} pipeline-parallel). Copy the whole folder."
        )
    return data, tensor, pipeline


def load_rank_file(path: Path) -> dict[Any, Any]:
    """Load a rank's dictionary, whose tensors stay on disk until they are used, without executing code from the file.

    Raises `ArtifactError` if the file is damaged or holds no dictionary.
    """
    return _load(path, dict)


def _load(path: Path, kind: type[Loaded]) -> Loaded:
    try:
        with torch.serialization.safe_globals([(TensorReference, _REFERENCE)]):
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        # The text before this advises to load the file without protection.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0] or type(error).__name__
        raise ArtifactError(f"{path}: not tensors of torch.save: {reason}. Copy it again.") from error
    if not isinstance(loaded, kind):
        raise ArtifactError(f"{path}: holds a {type(loaded).__name__}, expected a {kind.__name__}.")
    return loaded


def _resolve(path: Path, name: object, value: object) -> Tensor:
    """Return the tensor of an entry of a rank's file, in that file or beside it; it stays on disk until it is used."""
    if isinstance(value, TensorReference):
        value = _load(path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt", Tensor)
    if not isinstance(value, Tensor):
        raise ArtifactError(f"{path}: {name} is a {type(value).__name__}, expected a tensor.")
    return value.detach()


def _load_weights(path: Path) -> dict[str, Tensor]:
    return {
        str(name): _resolve(path, name, value)
        for name, value in load_rank_file(path).items()
        if not str(name).endswith(".rotary_emb.inv_freq")  # older versions stored these, but they are configured
    }


def _find_layout(
    folder: Path, ranks: Mapping[Rank, Mapping[str, Tensor]], model: Model, tensor_parallel_size: int
) -> NxdLayout:
    """Find the layout from the names in the files and the number of rows of their keys."""
    shapes = {name: weight.shape for weights in ranks.values() for name, weight in weights.items()}
    prefix = "model.layers.0.self_attn."
    key_rows = model.num_key_value_heads * model.head_dim
    copies, qkv_linear, fuse_qkv = 1, False, f"{prefix}qkv_proj.weight" in shapes
    if found := shapes.get(f"{prefix}qkv_proj.weight_k"):
        copies, qkv_linear = found[0] * tensor_parallel_size // key_rows, True
    elif found := shapes.get(f"{prefix}qkv_proj.weight_qkv"):
        rows = found[0] * tensor_parallel_size - model.query_size
        copies, qkv_linear, fuse_qkv = rows // (2 * key_rows), True, True
    layout = NxdLayout(tensor_parallel_size, max(copies, 1), qkv_linear, fuse_qkv)
    if misfit := layout.find_misfit(model):
        raise ArtifactError(
            f"{folder}: has files of {tensor_parallel_size} tensor-parallel ranks. With the recipe's model, {misfit}. "
            f"The checkpoint is of another model, or files are missing."
        )
    return layout


def _read_masters(folder: Path, rank: Rank, weights: Mapping[str, Tensor]) -> Masters | None:
    """Return what reads the float32 weights of a rank's ZeRO-1 optimizer; None if a run did not save them.

    Each data-parallel rank has some rows of each tensor, padded with zeros to equal numbers of rows. The optimizer
    numbers its tensors in the order in which the run's script grouped them, and that order is not saved. So a number's
    tensor is found by its values: rounded, they are the weights in `model`.

    Raises `ArtifactError` if masters are incomplete, or belong to other weights.
    """
    optimizer, (stage, index) = folder / OPTIMIZER, rank
    if not optimizer.exists():
        return None
    num_data, _, _ = _count_ranks(optimizer)
    paths = [optimizer / rank_file_name(number, index, stage) for number in range(num_data)]
    shards = [(path, load_rank_file(path).get(MASTERS) or {}) for path in paths]
    numbers = list(shards[0][1])
    if any(list(masters) != numbers for _, masters in shards):
        raise ArtifactError(f"{optimizer}: the data-parallel ranks of {paths[0].name} have different masters.")
    if not numbers:
        return None
    remaining, found = dict(weights), Masters()
    for number in numbers:
        first = _resolve(paths[0], number, shards[0][1][number])
        name = next((name for name, weight in remaining.items() if _are_first_rows(first, weight, num_data)), None)
        if name is None:
            raise ArtifactError(
                f"{paths[0]}: tensor {number}, {list(first.shape)}, fits no weight in `{MODEL}`: they are of different "
                f"steps. To import the weights in `{MODEL}`, move `{OPTIMIZER}` away."
            )
        found[name] = partial(_join_shards, name, remaining.pop(name), shards, number)
    if remaining:
        raise ArtifactError(f"{paths[0]}: has no float32 master weights of {', '.join(list(remaining)[:3])}.")
    return found


def _are_first_rows(shard: Tensor, weight: Tensor, num_data: int) -> bool:
    """Return whether a shard has the first rows of the weight before rounding."""
    return shard.shape == (-(-len(weight) // num_data), *weight.shape[1:]) and _are_near(shard, weight)


def _are_near(master: Tensor, weight: Tensor) -> bool:
    """Return whether the rows that both have are equal but for rounding."""
    rows = min(len(master), len(weight))
    smallest = torch.finfo(torch.float32).tiny  # a device may flush smaller numbers to zero
    return torch.allclose(master[:rows], weight[:rows].float(), rtol=RELATIVE_TOLERANCE, atol=smallest)


def _join_shards(name: str, weight: Tensor, shards: list[tuple[Path, dict[Any, Any]]], number: object) -> Tensor:
    master = torch.cat([_resolve(path, number, masters[number]) for path, masters in shards])
    if len(master) < len(weight) or not _are_near(master, weight):
        raise ArtifactError(
            f"{shards[0][0]}: the shards of {name}'s master on {len(shards)} data-parallel ranks do not round to the "
            f"weight in `{MODEL}`. Files of several checkpoints were mixed."
        )
    return master[: len(weight)]
