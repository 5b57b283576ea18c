"""Reads and writes the shards of a checkpoint: each worker writes its slices of the state, and reads those it needs.

Shards are safetensors files, whose headers name the run, step, layout and rank that they come from. A key names a slice
of a tensor (see `StateSlice.key`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest, ShardOrigin, compare_origins
from services.common.artifacts.files import describe_file
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError, unreadable
from services.common.program.state import StateKind, StateSlice, fill, overlap

ORIGIN = "millrace_origin"
"""The only key of a header's metadata, with the `ShardOrigin` as JSON: safetensors writes several keys in random order,
but equal states must have equal bytes.
"""
RESTORE_ADVICE = "Restore the checkpoint from a copy, or move its folder away: the run continues from the one before."
"""What a person may do about a damaged shard."""
Shapes = Mapping[str, Collection[int]]
"""Shapes of the model's full parameters, by name."""


def write_tensors(folder: Path, file: str, origin: ShardOrigin, content: dict[str, Tensor]) -> FileEntry:
    """Write tensors, and return the file's entry for the manifest once the bytes are on disk."""
    return write_packed(folder, file, pack_tensors(origin, content))


def pack_tensors(origin: ShardOrigin, content: dict[str, Tensor]) -> bytes:
    """Return the bytes of a file of tensors, which share no memory with them."""
    return safetensors.torch.save(content, metadata={ORIGIN: origin.model_dump_json()})


def write_packed(folder: Path, file: str, packed: bytes) -> FileEntry:
    """Write packed tensors as `write_tensors` does."""
    # Through a Python file: safetensors' own writer reports a full disk without its errno.
    with (folder / file).open("wb") as opened:
        opened.write(packed)
    return describe_file(folder, file)


@contextmanager
def open_tensors(folder: Path, file: str, origin: ShardOrigin) -> Iterator[Any]:
    """Open a file whose tensors are mapped, and read on demand.

    Raises `ArtifactError` if it cannot be read, or if its header names another origin.
    """
    path = folder / file
    try:
        with safetensors.safe_open(path, "pt") as tensors:
            found = ShardOrigin.model_validate_json((tensors.metadata() or {})[ORIGIN])
            if found != origin:
                raise ArtifactError(
                    f"{path}: shard of another checkpoint than the manifest's: {compare_origins(found, origin)}. "
                    f"{RESTORE_ADVICE}"
                )
            yield tensors
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, ValidationError) as error:
        raise ArtifactError(f"{path}: Millrace did not write it: its header has no valid {ORIGIN}.") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error


def pack_shard(origin: ShardOrigin, slices: Mapping[StateSlice, Tensor]) -> bytes:
    """Return the bytes of the shard with a rank's slices."""
    return pack_tensors(origin, {piece.key: each.view(piece.shape) for piece, each in slices.items()})


class Place(NamedTuple):
    """The place of a slice: its file, in which its key names it."""

    piece: StateSlice
    file: str


Places = dict[tuple[StateKind, str], list[Place]]
"""The places of slices, by the kind of state and the parameter's name."""


class SliceReader:
    """Reads slices of a checkpoint whose places are known.

    Raises `ArtifactError` for files that cannot be read or are of another origin, and unless the places have each
    element once.
    """

    def __init__(self, folder: Path, origins: Mapping[str, ShardOrigin], places: Places) -> None:
        self._folder, self._origins, self._places = folder, origins, places

    def files_of(self, targets: Collection[StateSlice]) -> list[str]:
        """Return the files that have elements of the targets."""
        return sorted({place.file for target in targets for place in self._overlapping(target)})

    def num_slices(self, kind: StateKind, name: str) -> int:
        return len(self._places[kind, name])

    def read(self, targets: Mapping[StateSlice, Tensor]) -> None:
        """Fill the tensors with the elements of their slices, from verified files, each of which is opened once.

        Raises `ArtifactError` for values that training cannot produce.
        """
        with ExitStack() as opened:
            files = {
                file: opened.enter_context(open_tensors(self._folder, file, self._origins[file]))
                for file in self.files_of(targets)
            }
            self.read_from(files, targets)

    def read_from(self, files: Mapping[str, Any], targets: Mapping[StateSlice, Tensor]) -> None:
        """Do the same as `read` with files that are open, by name."""
        for target, tensor in targets.items():
            sources = {
                place.piece: partial(self._read_slice, files[place.file], place) for place in self._overlapping(target)
            }
            try:
                fill(target, tensor, sources)
            except ValueError as error:
                raise ArtifactError(f"{self._folder}: is not the state of the model: {error}.") from error

    def _read_slice(self, file: Any, place: Place) -> Tensor:
        found: Tensor = file.get_tensor(place.piece.key)
        lowest, highest = (each.item() for each in found.aminmax())  # one pass; both are NaN if any element is
        is_finite = math.isfinite(lowest) and math.isfinite(highest)
        is_negative = place.piece.kind == "exp_avg_sq" and lowest < 0
        if is_negative or not is_finite:
            problem = f"its values are {lowest:g} to {highest:g}, expected finite ones, and no mean of squares below 0"
            raise ArtifactError(f"{self._folder / place.file}: {place.piece.key}: {problem}. {RESTORE_ADVICE}")
        return found

    def _overlapping(self, target: StateSlice) -> list[Place]:
        return [place for place in self._places.get((target.kind, target.name), []) if overlap(place.piece, target)]


class ShardReader(SliceReader):
    """Finds the slices of a whole checkpoint in the headers of all its files, and reads them.

    A worker that resumes reads by `loader.read_part` instead, which opens its own files alone.
    """

    def __init__(self, checkpoint: Artifact[CheckpointManifest], shapes: Shapes) -> None:
        super().__init__(checkpoint.path, checkpoint.manifest.checkpoint.shards, {})
        self._shapes = shapes
        for file, origin in self._origins.items():
            with open_tensors(self._folder, file, origin) as tensors:
                for piece in read_header(tensors):
                    self._places.setdefault((piece.kind, piece.name), []).append(Place(piece, file))

    def read_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read full weights, by name. Raises `ArtifactError` as `read` does."""
        shapes = {name: tuple(self._shapes[name]) for name in names}
        weights = {StateSlice.whole("weight", name, shape): torch.empty(shape) for name, shape in shapes.items()}
        self.read(weights)
        return {piece.name: tensor for piece, tensor in weights.items()}


def read_header(tensors: Any) -> Iterator[StateSlice]:
    """Yield the slices in an open shard."""
    return map(StateSlice.parse, tensors.keys())
