"""Reads the weights of a folder of torch.distributed.checkpoint (DCP), as torchtitan and FSDP runs save it.

The folder has `.metadata`, and files such as `__3_0.distcp` with chunks of tensors, each as `torch.save` wrote it.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from services.common.errors import ArtifactError
from services.common.input.files import open_regular_file, reading_inputs, stat_within
from services.common.input.problem_list import list_names
from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.dcp.metadata import METADATA, StoredChunk, StoredTensor, read_metadata
from services.trainer.conversion.dcp.names import find_model, pair_halves
from services.trainer.conversion.hugging_face import (
    INDEX,
    WEIGHTS,
    is_stored_twice,
    require_all_and_no_more,
    require_finite,
)
from services.trainer.conversion.saved_tensors import WEIGHT_DTYPES, load_saved, require_dense

SUFFIX = ".distcp"


def is_dcp_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a DCP checkpoint. Safetensors beside `.metadata` are read in its place.

    Raises `ArtifactError` for the folder above such folders, and for one whose save did not finish.
    """
    if any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX)):
        return False
    if os.path.lexists(folder / METADATA):
        return True
    if any(folder.glob(f"*{SUFFIX}")):
        raise ArtifactError(
            f"{folder}: has files {SUFFIX} without {METADATA}, which is written last: its save did not finish, or the "
            f"copy is incomplete. Use the checkpoint of another step."
        )
    if steps := sorted(path.parent.name for path in folder.glob(f"*/{METADATA}")):
        raise ArtifactError(f"{folder}: contains DCP checkpoints. Name one of them: {', '.join(steps[-5:])}.")
    return False


class DcpWeights:
    """Joins full weights from the chunks of all ranks, one weight at a time.

    Raises `ArtifactError` unless the checkpoint has the model's weights and all files that have them.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        stored = read_metadata(folder)
        tensors = {name: tensor for name, tensor in stored.items() if tensor is not None}
        try:
            named = find_model(tensors, (name for name, tensor in stored.items() if tensor is None))
        except ValueError as error:
            raise ArtifactError(f"{folder}: has no Llama: {error}, and has {_count(stored)}.") from error
        self._folder, self._model, self._is_torchtitans = folder, model, named.is_torchtitans
        self._names, self._tensors = named.stored, {name: tensors[own] for name, own in named.stored.items()}
        self._require_model()
        self._require_files()
        self.description = f"{'torchtitan' if named.is_torchtitans else 'Hugging Face'}'s names" + (
            f"; ignored beside the model: {_count(named.ignored)}" if named.ignored else ""
        )

    def read(self, name: str) -> Tensor:
        """Read a full parameter by Hugging Face's name, in float32."""
        tensor = self._tensors[name]
        weight = torch.full(tensor.shape, math.nan)  # values that chunks leave out are seen as not finite
        for chunk in tensor.chunks:
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            weight[place] = self._load(self._names[name], tensor, chunk)
        require_finite(self._folder, self._names[name], weight)
        return pair_halves(name, weight, self._model) if self._is_torchtitans else weight

    def _load(self, name: str, tensor: StoredTensor, chunk: StoredChunk) -> Tensor:
        path = self._folder / chunk.file
        with reading_inputs(self._folder), open_regular_file(path, self._folder) as file:
            file.seek(chunk.start)
            content = io.BufferedReader(file).read(chunk.length)  # the file alone reads at most 2 GiB at once
        _require_intact(path, name, chunk, content)
        found = require_dense(path, name, load_saved(path, self._folder, "a DCP checkpoint", io.BytesIO(content)))
        if found.dtype != tensor.dtype or found.shape != chunk.sizes:
            raise ArtifactError(
                f"{path}: has {found.dtype} {list(found.shape)} of {name}, but {METADATA} names {tensor.dtype} "
                f"{list(chunk.sizes)}. Files of several checkpoints were mixed."
            )
        return found

    def _require_model(self) -> None:
        shapes = parameter_shapes(self._model)
        unknown = [own for name, own in self._names.items() if name not in shapes and not is_stored_twice(name)]
        require_all_and_no_more(self._folder, [name for name in shapes if name not in self._tensors], unknown)
        for name, shape in shapes.items():
            tensor = self._tensors[name]
            if tensor.shape != shape or tensor.dtype not in WEIGHT_DTYPES:
                raise ArtifactError(
                    f"{self._folder}: {self._names[name]} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{list(shape)} of {', '.join(map(str, WEIGHT_DTYPES))}."
                )

    def _require_files(self) -> None:
        """Raise `ArtifactError` unless each file is there and long enough, before gigabytes are read from others."""
        ends: Counter[str] = Counter()
        for name in parameter_shapes(self._model):
            for chunk in self._tensors[name].chunks:
                ends[chunk.file] = max(ends[chunk.file], chunk.start + chunk.length)
        for file, end in ends.items():
            with reading_inputs(self._folder):
                size = stat_within(self._folder, file).st_size
            if size < end:
                raise ArtifactError(
                    f"{self._folder / file}: has {size:,} bytes, expected at least {end:,}. Copy the checkpoint again."
                )


def _require_intact(path: Path, name: str, chunk: StoredChunk, content: bytes) -> None:
    """Raise `ArtifactError` unless the checksums that `torch.save` wrote fit the bytes; `torch.load` ignores them."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive can raise anything
        raise ArtifactError(
            f"{path}: {name} at byte {chunk.start:,} is damaged: {error}. Copy the file again."
        ) from error
    if damaged is not None:
        raise ArtifactError(
            f"{path}: {name} at byte {chunk.start:,} is damaged: the checksum of its {damaged} differs. Copy the file "
            f"again."
        )


def _count(names: Iterable[str]) -> str:
    """Describe names by their first parts, such as `optimizer (873), dataloader (2)`."""
    return list_names(f"{part} ({number:,})" for part, number in Counter(name.split(".")[0] for name in names).items())
