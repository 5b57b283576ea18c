"""The files of a checkpoint: slices of the state, written by the worker that owns them, read by those that need them.

Any safetensors library opens one. A key says which slice of which tensor it is: see `StateSlice.key`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from services.common.artifacts.checkpoint import MOMENTS_1, WEIGHTS_1, CheckpointManifest, shard_name
from services.common.artifacts.files import describe_file, locate
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.program.state import StateKind, StateSlice, fill, overlap

Shapes = Mapping[str, Collection[int]]
"""Of the model's full parameters, by name."""


def write_shard(folder: Path, rank: int, slices: Mapping[StateSlice, Tensor]) -> FileEntry:
    """Write what a rank owns; the bytes are on disk when this returns, and described as a manifest lists them."""
    content = {piece.key: tensor.view(piece.shape) for piece, tensor in slices.items()}
    # Through a Python file: safetensors' own writer reports a full disk without its errno.
    with (folder / shard_name(rank)).open("wb") as file:
        file.write(safetensors.torch.save(content, metadata={"format": "pt"}))
    return describe_file(folder, shard_name(rank))


class ShardReader:
    """Where each slice of a checkpoint is, from its files' headers, and the reading of them.

    Raises `ArtifactError` for files that cannot be read, and for tensors that are not the model's.
    """

    def __init__(self, checkpoint: Artifact[CheckpointManifest], shapes: Shapes) -> None:
        self._folder, self._shapes = checkpoint.path, shapes
        self._places: dict[tuple[str, str], dict[StateSlice, tuple[str, str]]] = {}
        """By kind and parameter: the slices, each with its file and its key there."""
        for entry in checkpoint.manifest.files:
            for key, piece in self._read_header(entry.path, shapes):
                self._places.setdefault((piece.kind, piece.name), {})[piece] = (entry.path, key)

    def files_of(self, targets: Collection[StateSlice]) -> list[str]:
        """The files that have elements of the targets."""
        return sorted({file for target in targets for file, _ in self._overlapping(target).values()})

    def num_slices(self, kind: StateKind, name: str) -> int:
        """Into how many slices a tensor is cut."""
        return len(self._places.get((kind, name), {}))

    def read(self, targets: Mapping[StateSlice, Tensor]) -> None:
        """Fill the tensors with the elements of their slices. The files that have them must have been verified."""
        with ExitStack() as opened:
            files = {file: opened.enter_context(_open(self._folder, file)) for file in self.files_of(targets)}
            for target, tensor in targets.items():
                sources = {
                    piece: partial(files[file].get_tensor, key)
                    for piece, (file, key) in self._overlapping(target).items()
                }
                try:
                    fill(target, tensor, sources)
                except ValueError as error:
                    raise ArtifactError(f"{self._folder}: is not the state of the model: {error}.") from error

    def read_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Full weights by name."""
        shapes = {name: tuple(self._shapes[name]) for name in names}
        weights = {StateSlice.whole("weight", name, shape): torch.empty(shape) for name, shape in shapes.items()}
        self.read(weights)
        return {piece.name: tensor for piece, tensor in weights.items()}

    def _overlapping(self, target: StateSlice) -> dict[StateSlice, tuple[str, str]]:
        places = self._places.get((target.kind, target.name), {})
        return {piece: place for piece, place in places.items() if overlap(piece, target)}

    def _read_header(self, file: str, shapes: Shapes) -> Iterator[tuple[str, StateSlice]]:
        path = self._folder / file
        with _open(self._folder, file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                found = tensors.get_slice(key)
                piece = _slice_of(file, key, found.get_shape())
                _require_of_model(path, key, piece, shapes)
                if (tuple(found.get_shape()), found.get_dtype()) != (piece.shape, "F32"):
                    raise ArtifactError(
                        f"{path}: {key} is {found.get_dtype()} {found.get_shape()}, expected F32 {list(piece.shape)}."
                    )
                yield key, piece


def _slice_of(file: str, key: str, shape: Collection[int]) -> StateSlice:
    """The slice that a key names. Files of checkpoint/1 have whole tensors. Raises `ValueError` for no slice's name."""
    if file == WEIGHTS_1:
        return StateSlice.whole("weight", key, shape)
    if file == MOMENTS_1:
        moment, _, name = key.partition("/")
        if moment not in ("first", "second"):
            raise ValueError(f"{key!r} is no name of a moment, as 'first/model.norm.weight' is")
        return StateSlice.whole("exp_avg" if moment == "first" else "exp_avg_sq", name, shape)
    return StateSlice.parse(key)


def _require_of_model(path: Path, key: str, piece: StateSlice, shapes: Shapes) -> None:
    shape = shapes.get(piece.name)
    if shape is None:
        raise ArtifactError(f"{path}: {key}: the recipe's model has no parameter {piece.name}.")
    is_inside = len(piece.box) == len(shape) and all(
        last <= length for (_, last), length in zip(piece.box, shape, strict=True)
    )
    if not is_inside:
        raise ArtifactError(f"{path}: {key} is no part of the model's {piece.name}, which is {list(shape)}.")


@contextmanager
def _open(folder: Path, file: str) -> Iterator[Any]:
    """The file's tensors, read as they are asked for. Raises `ArtifactError` for what cannot be read."""
    path = locate(folder, file)
    try:
        with safetensors.safe_open(path, "pt") as tensors:
            yield tensors
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error
