"""The files of a checkpoint: slices of the state, written by the worker that owns them, read by those that need them.

Any safetensors library opens one. A key says which slice of which tensor it is (see `StateSlice.key`), and the header's
metadata say of which run, step, layout and rank the file is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor

from services.common.artifacts.checkpoint import CheckpointManifest, ShardOrigin, explain_origins
from services.common.artifacts.files import describe_file, locate
from services.common.artifacts.manifest import FileEntry
from services.common.artifacts.store import Artifact
from services.common.errors import ArtifactError
from services.common.input.files import InputFileError, require_regular_file, unreadable
from services.common.process.limits import explain_lack
from services.common.program.state import Misfit, StateKind, StateSlice, fill, find_misfit, overlap

Shapes = Mapping[str, Collection[int]]
"""Of the model's full parameters, by name."""
ORIGIN = "millrace_origin"
"""The key of a header's metadata that has the `ShardOrigin`, as JSON. It is the only one: safetensors writes several in
another order each time, and equal states shall have equal bytes."""
_SHOWN_MISFITS = 10


def write_shard(folder: Path, file: str, origin: ShardOrigin, slices: Mapping[StateSlice, Tensor]) -> FileEntry:
    """Write what a rank owns; the bytes are on disk when this returns, and described as a manifest lists them."""
    content = {piece.key: tensor.view(piece.shape) for piece, tensor in slices.items()}
    # Through a Python file: safetensors' own writer reports a full disk without its errno.
    with (folder / file).open("wb") as opened:
        opened.write(safetensors.torch.save(content, metadata={ORIGIN: origin.model_dump_json()}))
    return describe_file(folder, file)


class _Place(NamedTuple):
    """The place of a slice: its file, and its key there."""

    piece: StateSlice
    file: str
    key: str


class ShardReader:
    """Where each slice of a checkpoint is, from its files' headers, and the reading of them.

    Every file is opened once for its header; what is found there is compared by sorting, so the time grows with the
    number of slices, hardly faster than they, and not with their elements.

    Raises `ArtifactError` for files that cannot be read or come from another state than the manifest says, for tensors
    that are not the model's, and unless the slices make up the model's state, each element once.
    """

    def __init__(self, checkpoint: Artifact[CheckpointManifest], shapes: Shapes) -> None:
        self._folder, self._shapes = checkpoint.path, shapes
        self._places: dict[tuple[StateKind, str], list[_Place]] = {}
        """The slices of each tensor, by the kind of state and the parameter's name."""
        for entry in checkpoint.manifest.files:
            for place in self._read_header(entry.path, checkpoint.manifest.checkpoint.shards[entry.path]):
                self._places.setdefault((place.piece.kind, place.piece.name), []).append(place)
        self._require_each_element_once()

    def files_of(self, targets: Collection[StateSlice]) -> list[str]:
        """The files that have elements of the targets."""
        return sorted({place.file for target in targets for place in self._overlapping(target)})

    def num_slices(self, kind: StateKind, name: str) -> int:
        """Into how many slices a tensor is cut."""
        return len(self._places[kind, name])

    def read(self, targets: Mapping[StateSlice, Tensor], *, allows_non_finite: bool = False) -> None:
        """Fill the tensors with the elements of their slices. The files that have them must have been verified.

        Raises `ArtifactError` for values that no training leaves, as `require_values_of_training` does: each slice is
        looked at as it is read. Those that are NaN or infinite can be allowed.
        """
        with ExitStack() as opened:
            files = {file: opened.enter_context(_open(self._folder, file)) for file in self.files_of(targets)}
            for target, tensor in targets.items():
                sources = {
                    place.piece: partial(self._read_slice, files[place.file], place, allows_non_finite)
                    for place in self._overlapping(target)
                }
                try:
                    fill(target, tensor, sources)
                except ValueError as error:
                    raise ArtifactError(f"{self._folder}: is not the state of the model: {error}.") from error

    def require_values_of_training(self) -> None:
        """Raise `ArtifactError` for a slice with values that are NaN, infinite or a mean of squares below zero."""
        by_file: dict[str, list[_Place]] = {}
        for place in itertools.chain.from_iterable(self._places.values()):
            by_file.setdefault(place.file, []).append(place)
        for file, places in by_file.items():
            with _open(self._folder, file) as tensors:
                for place in places:
                    self._read_slice(tensors, place, allows_non_finite=False)

    def read_weights(self, names: Iterable[str], *, allows_non_finite: bool = False) -> dict[str, Tensor]:
        """Full weights by name. Raises `ArtifactError` as `read` does."""
        shapes = {name: tuple(self._shapes[name]) for name in names}
        weights = {StateSlice.whole("weight", name, shape): torch.empty(shape) for name, shape in shapes.items()}
        self.read(weights, allows_non_finite=allows_non_finite)
        return {piece.name: tensor for piece, tensor in weights.items()}

    def _read_slice(self, file: Any, place: _Place, allows_non_finite: bool) -> Tensor:
        found: Tensor = file.get_tensor(place.key)
        lowest, highest = (each.item() for each in found.aminmax())  # in one pass; each is NaN where any element is
        is_finite = math.isfinite(lowest) and math.isfinite(highest)
        if place.piece.kind == "exp_avg_sq" and lowest < 0:
            problem = f"its lowest value is {lowest:g}, and a mean of squares is never below zero"
        elif not is_finite and not allows_non_finite:
            num_bad = int((~torch.isfinite(found)).sum())
            problem = f"{num_bad:,} of {found.numel():,} values are NaN or infinite, and no such state is saved"
        else:
            return found
        raise ArtifactError(
            f"{self._folder / place.file}: {place.key}: {problem}. Restore the checkpoint from a copy, or move its "
            f"folder away: the run then continues from the one before."
        )

    def _overlapping(self, target: StateSlice) -> list[_Place]:
        return [place for place in self._places.get((target.kind, target.name), []) if overlap(place.piece, target)]

    def _read_header(self, file: str, origin: ShardOrigin) -> Iterator[_Place]:
        path = self._folder / file
        with _open(self._folder, file) as tensors:
            _require_origin(path, tensors.metadata(), origin)
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                found = tensors.get_slice(key)
                piece = StateSlice.parse(key)
                _require_of_model(path, key, piece, self._shapes)
                if (tuple(found.get_shape()), found.get_dtype()) != (piece.shape, "F32"):
                    raise ArtifactError(
                        f"{path}: {key} is {found.get_dtype()} {found.get_shape()}, expected F32 {list(piece.shape)}."
                    )
                yield _Place(piece, file, key)

    def _require_each_element_once(self) -> None:
        misfits = []
        for kind in get_args(StateKind):
            for name, shape in self._shapes.items():
                places = self._places.get((kind, name), [])
                misfit = find_misfit(StateSlice.whole(kind, name, shape), [place.piece for place in places])
                if misfit:
                    misfits.append(_explain_misfit(misfit, places))
        if misfits:
            more = len(misfits) - _SHOWN_MISFITS
            shown = [*misfits[:_SHOWN_MISFITS], *([f"and {more:,} tensors more"] if more > 0 else [])]
            raise ArtifactError(
                f"{self._folder}: is not the state of the model: its files must hold each element of "
                f"{len(get_args(StateKind)) * len(self._shapes):,} tensors once, which is not so for "
                f"{len(misfits):,}:\n  " + "\n  ".join(shown) + "\nFiles of several checkpoints "
                "were mixed, or another program wrote them. Restore the checkpoint from a copy, or move its folder "
                "away: the run then continues from the one before."
            )


def _explain_misfit(misfit: Misfit, places: list[_Place]) -> str:
    beside = " and ".join(f"{places[number].key} in {places[number].file}" for number in misfit.numbers)
    if not misfit.is_gap:
        return f"{misfit.part.key} is there twice: {beside}"
    if not places:
        return f"{misfit.part.key} is missing: no file has a slice of this tensor"
    return f"{misfit.part.key} is missing" + (f", beside {beside}" if beside else ": no file has any of these rows")


def _require_origin(path: Path, metadata: Mapping[str, str] | None, expected: ShardOrigin) -> None:
    try:
        found = ShardOrigin.model_validate_json((metadata or {})[ORIGIN])
    except KeyError:
        raise ArtifactError(
            f"{path}: its header does not say of which run and step it is ({ORIGIN}), so Millrace did not write it. "
            f"Restore the checkpoint from a copy."
        ) from None
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: its header says nothing that could be read of its run and step: {error.errors()[0]['msg']}. "
            f"Restore the checkpoint from a copy."
        ) from error
    if found != expected:
        raise ArtifactError(
            f"{path}: is a shard of another state than the manifest says: {explain_origins(found, expected)}. Restore "
            f"the checkpoint from a copy, or move its folder away: the run then continues from the one before."
        )


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
        require_regular_file(path, folder)
        with safetensors.safe_open(path, "pt") as tensors:
            yield tensors
    except InputFileError as error:
        raise unreadable(path, error) from error
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, MemoryError) as error:
        raise explain_lack(error, path) or ArtifactError(f"{path}: cannot be read as safetensors: {error}.") from error
