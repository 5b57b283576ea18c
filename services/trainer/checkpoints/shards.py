"""Reads and writes the shards of a checkpoint: each worker writes its slices of the state, and reads those it needs.

Any safetensors library opens a shard. A key names a slice of a tensor (see `StateSlice.key`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from services.common.artifacts.checkpoint import INDEX_FILE, CheckpointManifest, ShardOrigin
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.program.state import Misfit, StateKind, StateSlice, fill, find_misfit, overlap
from services.trainer.checkpoints.safetensors_file import open_tensors, write_tensors

Shapes = Mapping[str, Collection[int]]
"""Shapes of the model's full parameters, by name."""
_SHOWN_MISFITS = 10


def write_shard(folder: Path, file: str, origin: ShardOrigin, slices: Mapping[StateSlice, Tensor]) -> FileEntry:
    """Write a rank's slices, and return the file's entry for the manifest once the bytes are on disk."""
    return write_tensors(folder, file, origin, {piece.key: each.view(piece.shape) for piece, each in slices.items()})


class Place(NamedTuple):
    """The place of a slice: its file, and its key there."""

    piece: StateSlice
    file: str

    @property
    def key(self) -> str:
        return self.piece.key


Places = dict[tuple[StateKind, str], list[Place]]
"""The places of slices, by the kind of state and the parameter's name."""


class SliceReader:
    """Reads slices of a checkpoint whose places are known.

    Methods raise `ArtifactError` for files that cannot be read or are of another origin, and where the places do not
    have each element once.
    """

    def __init__(self, folder: Path, origin_of: Callable[[str], ShardOrigin], shapes: Shapes, places: Places) -> None:
        self._folder, self._origin_of, self._shapes, self._places = folder, origin_of, shapes, places

    def files_of(self, targets: Collection[StateSlice]) -> list[str]:
        """Return the files that have elements of the targets."""
        return sorted({place.file for target in targets for place in self._overlapping(target)})

    def num_slices(self, kind: StateKind, name: str) -> int:
        """Return the number of slices of a tensor."""
        return len(self._places[kind, name])

    def read(self, targets: Mapping[StateSlice, Tensor], *, allows_non_finite: bool = False) -> None:
        """Fill the tensors with the elements of their slices, from verified files, each of which is opened once.

        Raises `ArtifactError` for values that training cannot produce, as `require_values_of_training` does, for each
        slice as it is read. `allows_non_finite` allows NaN and infinite values.
        """
        with ExitStack() as opened:
            files = {
                file: opened.enter_context(open_tensors(self._folder, file, self._origin_of(file)))
                for file in self.files_of(targets)
            }
            self.read_from(files, targets, allows_non_finite=allows_non_finite)

    def read_from(
        self, files: Mapping[str, Any], targets: Mapping[StateSlice, Tensor], *, allows_non_finite: bool = False
    ) -> None:
        """Do the same as `read` with files that are open, by name."""
        for target, tensor in targets.items():
            places = self._overlapping(target)
            sources = {
                place.piece: partial(self._read_slice, files[place.file], place, allows_non_finite) for place in places
            }
            try:
                if len(sources) < len(places):
                    raise ValueError(f"two files have one slice of {target.key}")
                fill(target, tensor, sources)
            except ValueError as error:
                raise ArtifactError(f"{self._folder}: is not the state of the model: {error}.") from error

    def require_each_element_once(self) -> None:
        """Raise `ArtifactError`, which names the tensors, unless the places have each element of the state once."""
        misfits = []
        for kind in get_args(StateKind):
            for name, shape in self._shapes.items():
                places = self._places.get((kind, name), [])
                misfit = find_misfit(StateSlice.whole(kind, name, shape), [place.piece for place in places])
                if misfit:
                    misfits.append(_explain_misfit(misfit, places))
        if misfits:
            more = len(misfits) - _SHOWN_MISFITS
            shown = [*misfits[:_SHOWN_MISFITS], *([f"and {more:,} more tensors"] if more > 0 else [])]
            raise ArtifactError(
                f"{self._folder}: is not the state of the model: its files must hold each element of "
                f"{len(get_args(StateKind)) * len(self._shapes):,} tensors once, but do not for "
                f"{len(misfits):,}:\n  " + "\n  ".join(shown) + "\nFiles of several checkpoints "
                "were mixed, or another program wrote them. Restore the checkpoint from a copy, or move its folder "
                "away: then the run continues from the one before."
            )

    def _read_slice(self, file: Any, place: Place, allows_non_finite: bool) -> Tensor:
        found: Tensor = file.get_tensor(place.key)
        lowest, highest = (each.item() for each in found.aminmax())  # one pass; both are NaN if any element is
        is_finite = math.isfinite(lowest) and math.isfinite(highest)
        if place.piece.kind == "exp_avg_sq" and lowest < 0:
            problem = f"its lowest value is {lowest:g}, but a mean of squares is never below zero"
        elif not is_finite and not allows_non_finite:
            num_bad = int((~torch.isfinite(found)).sum())
            problem = f"{num_bad:,} of {found.numel():,} values are NaN or infinite, but no run saves such a state"
        else:
            return found
        raise ArtifactError(
            f"{self._folder / place.file}: {place.key}: {problem}. Restore the checkpoint from a copy, or move its "
            f"folder away: then the run continues from the one before."
        )

    def _overlapping(self, target: StateSlice) -> list[Place]:
        return [place for place in self._places.get((target.kind, target.name), []) if overlap(place.piece, target)]


class ShardReader(SliceReader):
    """Finds the slices of a checkpoint in its files' headers, and reads them.

    Every file is opened once for its header, and the slices are compared by sorting: n slices cost n log n comparisons,
    whatever their sizes. A worker that resumes reads by `index.read_part` instead, which opens its own files alone.

    Raises `ArtifactError` for files that cannot be read or belong to another state than the manifest's, for tensors
    that are not the model's, and unless the slices hold each element of the model's state once.
    """

    def __init__(self, checkpoint: Artifact[CheckpointManifest], shapes: Shapes) -> None:
        origins = checkpoint.manifest.checkpoint.shards
        super().__init__(checkpoint.path, origins.__getitem__, shapes, {})
        for file in origins:
            with open_tensors(self._folder, file, origins[file]) as tensors:
                for piece in read_header(self._folder / file, tensors, shapes):
                    self._places.setdefault((piece.kind, piece.name), []).append(Place(piece, file))
        self.require_each_element_once()

    def require_index(self, index: Places) -> None:
        """Raise `ArtifactError` unless an index has exactly the slices of the shards, each in its shard."""
        for tensor in sorted(self._places.keys() | index.keys()):
            held, listed = (Counter(places.get(tensor, ())) for places in (self._places, index))
            for place in (held - listed) + (listed - held):
                raise ArtifactError(
                    f"{self._folder / INDEX_FILE}: has {place.key} of {place.file} {listed[place]} times, but "
                    f"{place.file} has it {held[place]} times. Restore the checkpoint from a copy, or move its folder "
                    f"away: then the run continues from the one before."
                )

    def require_values_of_training(self) -> None:
        """Raise `ArtifactError` for a slice with values that are NaN, infinite or a mean of squares below zero."""
        by_file: dict[str, list[Place]] = {}
        for place in itertools.chain.from_iterable(self._places.values()):
            by_file.setdefault(place.file, []).append(place)
        for file, places in by_file.items():
            with open_tensors(self._folder, file, self._origin_of(file)) as tensors:
                for place in places:
                    self._read_slice(tensors, place, allows_non_finite=False)

    def read_weights(self, names: Iterable[str], *, allows_non_finite: bool = False) -> dict[str, Tensor]:
        """Read full weights, by name. Raises `ArtifactError` as `read` does."""
        shapes = {name: tuple(self._shapes[name]) for name in names}
        weights = {StateSlice.whole("weight", name, shape): torch.empty(shape) for name, shape in shapes.items()}
        self.read(weights, allows_non_finite=allows_non_finite)
        return {piece.name: tensor for piece, tensor in weights.items()}


def read_header(path: Path, tensors: Any, shapes: Shapes) -> Iterator[StateSlice]:
    """Yield the slices in an open shard. Raises `ArtifactError` for one that is not the model's, or no float32."""
    for key in tensors.keys():  # noqa: SIM118 - no mapping
        found = tensors.get_slice(key)
        piece = StateSlice.parse(key)
        require_of_model(path, piece, shapes)
        if (tuple(found.get_shape()), found.get_dtype()) != (piece.shape, "F32"):
            raise ArtifactError(
                f"{path}: {key} is {found.get_dtype()} {found.get_shape()}, expected F32 {list(piece.shape)}."
            )
        yield piece


def require_of_model(path: Path, piece: StateSlice, shapes: Shapes) -> None:
    """Raise `ArtifactError` for a slice that the file at `path` has or names, unless it is a part of the model."""
    shape = shapes.get(piece.name)
    if shape is None:
        raise ArtifactError(f"{path}: {piece.key}: the recipe's model has no parameter {piece.name}.")
    is_inside = len(piece.box) == len(shape) and all(
        last <= length for (_, last), length in zip(piece.box, shape, strict=True)
    )
    if not is_inside:
        raise ArtifactError(f"{path}: {piece.key} is not a part of the model's {piece.name}, which is {list(shape)}.")


def _explain_misfit(misfit: Misfit, places: list[Place]) -> str:
    beside = " and ".join(f"{places[number].key} in {places[number].file}" for number in misfit.numbers)
    if not misfit.is_gap:
        return f"{misfit.part.key} exists twice: {beside}"
    if not places:
        return f"{misfit.part.key} is missing: no file has a slice of this tensor"
    return f"{misfit.part.key} is missing" + (f", beside {beside}" if beside else ": no file has any of these rows")
