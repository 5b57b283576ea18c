"""A checkpoint of NxD's `save_checkpoint` and `load_checkpoint` (neuronx-distributed 0.18): the folder of its tag.

    checkpoint, done            say that its save has begun, and that it has ended
    model/dp_rank_00_tp_rank_03_pp_rank_00.pt
    optim/dp_rank_17_tp_rank_03_pp_rank_00.pt

Of the optimizer's files the masters are read; `scheduler.pt` and `user_content.pt` are not.
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
from services.trainer.conversion.hugging_face import require_finite
from services.trainer.conversion.nxd.layout import NxdLayout, rank_tensors
from services.trainer.conversion.nxd.master_weights import OPTIMIZER, read_masters
from services.trainer.conversion.nxd.rank_file import count_ranks, load_rank_file, rank_file_name, resolve

BEGUN, COMMITTED = "checkpoint", "done"
MODEL = "model"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rank = tuple[int, int]
"""Of the pipeline and of the tensor axis."""


def is_nxd_checkpoint(folder: Path) -> bool:
    """Is it the folder of a tag? Raises `ArtifactError` for the one above or below, and for NxD's older form."""
    if (folder / MODEL).is_dir():
        return True
    tags = sorted(path.parent.name for path in folder.glob(f"*/{BEGUN}"))
    if tags:
        raise ArtifactError(f"{folder}: is a folder of NxD's checkpoints. Name one of them: {', '.join(tags[-5:])}.")
    if (folder / rank_file_name(0, 0, 0)).exists():
        raise ArtifactError(f"{folder}: is a part of NxD's checkpoint. Name the folder above it.")
    if any(folder.glob("tp_rank_*")):
        raise ArtifactError(
            f"{folder}: is of NxD's form before `nxd.save_checkpoint`. Load it in NxD, and save it with that function."
        )
    return False


class NxdWeights:
    """The weights of a checkpoint that was committed and holds the model: full ones, from the parts of the ranks.

    Raises `ArtifactError` for another one, and where copies of what it has several times differ.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        if not (folder / COMMITTED).exists():
            raise ArtifactError(
                f"{folder}: has no file `{COMMITTED}`: its save did not end, or its removal began. Use another tag."
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
        """A full parameter, by Hugging Face's name, as float32: the optimizer's master where there is one."""
        found: Tensor | None = None
        for nxd_name, stage, number in self._places(name):
            weight = self._join(nxd_name, stage, number)
            require_finite(self._folder, name, weight)
            if found is not None and not torch.equal(found, weight):
                raise ArtifactError(f"{self._folder}: its copies of {name} differ: {nxd_name} of stage {stage}.")
            found = weight
        assert found is not None  # _require_model
        return found

    def _places(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Of a parameter: the tensors that have it, each with its pipeline stage and the number of the part there."""
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
        """Each name is there, on all ranks of a stage, with the shape that it has to have."""
        present = {name for weights in ranks.values() for name in weights}
        missing, unknown = [name for name in self._tensors if name not in present], sorted(present - set(self._tensors))
        if missing or unknown:
            raise ArtifactError(
                f"{self._folder}: holds other weights than the recipe's model: {len(missing)} missing "
                f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})."
            )
        for (stage, index), weights in ranks.items():
            path = self._folder / MODEL / rank_file_name(0, index, stage)
            if uneven := set(weights) ^ set(ranks[stage, 0]):
                raise ArtifactError(f"{path}: {min(uneven)} is on some ranks of its stage and not on others.")
            for name, weight in weights.items():
                shapes = [part.shape(self._shapes[part.name], self._layout) for part in self._tensors[name]]
                expected = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
                if list(weight.shape) != expected:
                    raise ArtifactError(
                        f"{path}: {name} is {list(weight.shape)}, expected {expected}: the recipe's model on "
                        f"{self._num_tensor} tensor-parallel ranks, with {self._layout.kv_size_multiplier} of each "
                        f"key-value head. It is of another model, or the files of the last ranks are missing."
                    )


def write_nxd_model(
    folder: Path, model: Model, layout: NxdLayout, read: Callable[[Iterable[str]], Mapping[str, Tensor]]
) -> None:
    """Write a checkpoint's `model`, float32, and its markers. In memory are one rank's tensors, and one parameter.

    Raises `RecipeError` where the model cannot be split so.
    """
    misfit = layout.find_misfit(model)
    if misfit:
        raise RecipeError(f"NxD cannot have this model so: {misfit}. Change the options of `export --format nxd`.")
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
        if not str(name).endswith(".rotary_emb.inv_freq")  # which older versions stored, and the configuration says
    }
    for name, weight in weights.items():
        if weight.dtype not in DTYPES:
            raise ArtifactError(f"{path}: {name} is {weight.dtype}, expected {', '.join(map(str, DTYPES))}.")
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
    """That of the names in the files, and of how many rows their keys have."""
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
            f"It is of another model, or files are missing."
        )
    return layout
