"""Reads and writes checkpoints of NxD's `save_checkpoint` and `load_checkpoint` (neuronx-distributed 0.18).

The folder of a checkpoint's tag has:

    checkpoint, done            markers: the save has begun, the save has ended
    model/dp_rank_00_tp_rank_03_pp_rank_00.pt
    optim/dp_rank_17_tp_rank_03_pp_rank_00.pt

Only the float32 weights are read of the optimizer's files; `scheduler.pt` and `user_content.pt` are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from services.common.artifacts.manifest import sync_folder, write_durably
from services.common.errors import ArtifactError, RecipeError
from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.hugging_face import require_all_and_no_more, require_finite
from services.trainer.conversion.nxd.layout import NxdLayout, rank_tensors
from services.trainer.conversion.nxd.master_weights import OPTIMIZER, read_masters
from services.trainer.conversion.nxd.rank_file import count_ranks, load_rank_file, rank_file_name, resolve
from services.trainer.conversion.saved_tensors import WEIGHT_DTYPES

BEGUN, COMMITTED = "checkpoint", "done"
MODEL = "model"

Rank = tuple[int, int]
"""Ranks along the pipeline axis and the tensor axis."""


def is_nxd_checkpoint(folder: Path) -> bool:
    """Return whether a folder is that of an NxD checkpoint's tag.

    Raises `ArtifactError` for the folder above or below a tag's, and for NxD's older format.
    """
    if (folder / MODEL).is_dir():
        return True
    tags = sorted(path.parent.name for path in folder.glob(f"*/{BEGUN}"))
    if tags:
        raise ArtifactError(f"{folder}: contains NxD checkpoints. Name one of them: {', '.join(tags[-5:])}.")
    if (folder / rank_file_name(0, 0, 0)).exists():
        raise ArtifactError(f"{folder}: is a part of an NxD checkpoint. Name the folder above it.")
    if any(folder.glob("tp_rank_*")):
        raise ArtifactError(
            f"{folder}: has NxD's format from before `nxd.save_checkpoint`. Load it in NxD and save it with that "
            f"function."
        )
    return False


class NxdWeights:
    """Joins the full weights of a committed checkpoint from the parts of its ranks.

    Raises `ArtifactError` unless the checkpoint is complete and of the model, and if copies of a tensor differ.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        if not (folder / COMMITTED).exists():
            raise ArtifactError(
                f"{folder}: has no file `{COMMITTED}`: its save did not finish, or its removal began. Use another tag."
            )
        _, self._num_tensor, self._num_pipeline = count_ranks(folder / MODEL)
        ranks = {
            (stage, index): _load_weights(folder / MODEL / rank_file_name(0, index, stage))
            for stage in range(self._num_pipeline)
            for index in range(self._num_tensor)
        }
        self._folder, self._model, self._shapes = folder, model, parameter_shapes(model)
        self._layout = _find_layout(folder, ranks, model, self._num_tensor)
        self._tensors = rank_tensors(model, self._layout)
        self._require_model(ranks)
        masters = _read_masters(folder, ranks)
        self.has_masters = None not in masters.values()
        self._readers = {
            rank: masters[rank] or {name: weight.float for name, weight in weights.items()}
            for rank, weights in ranks.items()
        }

    def read(self, name: str) -> Tensor:
        """Read a full parameter by Hugging Face's name, in float32: the optimizer's master if there is one."""
        found: Tensor | None = None
        for nxd_name, stage, number in self._places(name):
            weight = self._join(nxd_name, stage, number)
            require_finite(self._folder, name, weight)
            if found is not None and not torch.equal(found, weight):
                raise ArtifactError(f"{self._folder}: the copies of {name} differ: {nxd_name} of stage {stage}.")
            found = weight
        assert found is not None  # _require_model
        return found

    def _places(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Yield the tensors that have a parameter, with their pipeline stage and the number of the part in them."""
        for nxd_name, parts in self._tensors.items():
            names = [part.name for part in parts]
            if name in names:
                for stage in range(self._num_pipeline):
                    if nxd_name in self._readers[stage, 0]:
                        yield nxd_name, stage, names.index(name)

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
        """Raise `ArtifactError` unless all ranks of a stage have its names, with the shapes of the model."""
        present = {name for weights in ranks.values() for name in weights}
        missing, unknown = [name for name in self._tensors if name not in present], sorted(present - set(self._tensors))
        require_all_and_no_more(self._folder, missing, unknown)
        for (stage, index), weights in ranks.items():
            path = self._folder / MODEL / rank_file_name(0, index, stage)
            if uneven := set(weights) ^ set(ranks[stage, 0]):
                raise ArtifactError(f"{path}: {min(uneven)} is only on some ranks of its stage.")
            for name, weight in weights.items():
                shapes = [part.shape(self._shapes[part.name], self._layout) for part in self._tensors[name]]
                expected = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
                if list(weight.shape) != expected:
                    raise ArtifactError(
                        f"{path}: {name} is {list(weight.shape)}, expected {expected}: the recipe's model on "
                        f"{self._num_tensor} tensor-parallel ranks, with {self._layout.kv_size_multiplier} of each "
                        f"key-value head. The checkpoint is of another model, or files of the last ranks are missing."
                    )


def write_nxd_model(
    folder: Path, model: Model, layout: NxdLayout, read: Callable[[Iterable[str]], Mapping[str, Tensor]]
) -> None:
    """Write a checkpoint's `model` in float32, and its markers. One rank's tensors and one parameter are in memory.

    Raises `RecipeError` if NxD cannot split the model by this layout.
    """
    misfit = layout.find_misfit(model)
    if misfit:
        raise RecipeError(f"NxD cannot split this model: {misfit}. Change the options of `export --format nxd`.")
    write_durably(folder / BEGUN, b"1")
    (folder / MODEL).mkdir()
    for index in range(layout.tensor_parallel_size):
        state = {
            name: torch.cat([part.split(read([part.name])[part.name], layout, model)[index] for part in parts])
            for name, parts in rank_tensors(model, layout).items()
        }
        with (folder / MODEL / rank_file_name(0, index, 0)).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder / MODEL)
    write_durably(folder / COMMITTED, b"1")


def _load_weights(path: Path) -> dict[str, Tensor]:
    weights = {
        str(name): resolve(path, name, value)
        for name, value in load_rank_file(path).items()
        if not str(name).endswith(".rotary_emb.inv_freq")  # older versions stored these, but they are configured
    }
    for name, weight in weights.items():
        if weight.dtype not in WEIGHT_DTYPES:
            raise ArtifactError(f"{path}: {name} is {weight.dtype}, expected {', '.join(map(str, WEIGHT_DTYPES))}.")
    return weights


def _read_masters(
    folder: Path, ranks: Mapping[Rank, Mapping[str, Tensor]]
) -> dict[Rank, dict[str, Callable[[], Tensor]] | None]:
    try:
        masters = {rank: read_masters(folder, rank, weights) for rank, weights in ranks.items()}
        if None in masters.values() and any(masters.values()):
            raise ArtifactError(f"{folder / OPTIMIZER}: some ranks have masters and others have none.")
    except ArtifactError as error:
        raise ArtifactError(f"{error} To import the weights in `{MODEL}`, move `{OPTIMIZER}` away.") from error
    return masters


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
        rows = found[0] * tensor_parallel_size - model.hidden_size
        copies, qkv_linear, fuse_qkv = rows // (2 * key_rows), True, True
    layout = NxdLayout(tensor_parallel_size, max(copies, 1), qkv_linear, fuse_qkv)
    misfit = layout.find_misfit(model)
    if misfit:
        raise ArtifactError(
            f"{folder}: has files of {tensor_parallel_size} tensor-parallel ranks. With the recipe's model, {misfit}. "
            f"The checkpoint is of another model, or files are missing."
        )
    return layout
