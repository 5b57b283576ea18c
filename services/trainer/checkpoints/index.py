"""Writes and reads the index of a checkpoint, by which workers of another layout find the shards that they need.

An index is a safetensors file, whose tensors are mapped: a worker reads the rows of the parameters that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch

from services.common.artifacts.checkpoint import INDEX_FILE, ShardOrigin, shard_name
from services.common.artifacts.manifest import FileEntry
from services.common.errors import ArtifactError
from services.common.program.state import StateKind, StateSlice
from services.trainer.checkpoints.safetensors_file import open_tensors, write_tensors
from services.trainer.checkpoints.shards import Place, Places, Shapes, require_of_model

Rows = Mapping[tuple[StateKind, str], np.ndarray]
"""Slices of tensors, by kind and parameter: int64 [slices, 7] of `StateSlice.row` and the number of the shard."""
NUM_COLUMNS = 7


def tabulate(slices: Iterable[tuple[StateSlice, int]]) -> Rows:
    """Return the rows of slices, each with the number of its shard."""
    rows: dict[tuple[StateKind, str], list[tuple[int, ...]]] = {}
    for piece, number in slices:
        rows.setdefault((piece.kind, piece.name), []).append((*piece.row, number))
    return {tensor: np.array(each, np.int64) for tensor, each in rows.items()}


def of_all_kinds(owners: Mapping[str, np.ndarray]) -> Rows:
    """Return the rows of a state of which every kind has the slices that `ShardedState.find_owners` returned."""
    return {(kind, name): rows.copy() for kind in get_args(StateKind) for name, rows in owners.items()}


def write_index(folder: Path, origin: ShardOrigin, rows: Rows) -> FileEntry:
    """Write the index, and return its entry for the manifest once the bytes are on disk. `origin` is rank 0's.

    It has 56 bytes for each slice of each kind: 30 MB for 70 billion parameters on 1,024 workers.
    """
    content = {f"{kind}/{name}": torch.from_numpy(each) for (kind, name), each in rows.items()}
    return write_tensors(folder, INDEX_FILE, origin, content)


def read_index(
    folder: Path, origin: ShardOrigin, shapes: Shapes, files: Collection[str], targets: Collection[StateSlice] | None
) -> Places:
    """Return the places of the slices that may have elements of the targets, or of all slices, from a verified index.

    It maps the index, and costs the rows of the targets' tensors. Raises `ArtifactError` for a row that is no slice of
    the model, or whose shard is not among `files`.
    """
    path, places = folder / INDEX_FILE, Places()
    with open_tensors(folder, INDEX_FILE, origin) as tensors:
        keys = set(tensors.keys())
        wanted: dict[str, list[StateSlice]] = {} if targets is not None else {key: [] for key in keys}
        for target in targets or ():
            wanted.setdefault(f"{target.kind}/{target.name}", []).append(target)
        for key in sorted(keys & set(wanted)):
            rows = _require_table(path, key, tensors.get_tensor(key))
            found = rows if targets is None else rows[_may_overlap(rows, wanted[key])]
            for place in _read_places(path, key, found, shapes, files):
                places.setdefault((place.piece.kind, place.piece.name), []).append(place)
    return places


def _require_table(path: Path, key: str, table: torch.Tensor) -> np.ndarray:
    if table.dtype != torch.int64 or table.ndim != 2 or table.shape[1] != NUM_COLUMNS:
        raise ArtifactError(
            f"{path}: {key} is {table.dtype} {list(table.shape)}, expected torch.int64 [slices, {NUM_COLUMNS}]."
        )
    rows: np.ndarray = table.numpy()
    return rows


def _may_overlap(rows: np.ndarray, targets: Iterable[StateSlice]) -> np.ndarray:
    """Return for each row whether the rectangle around its slice meets that around a target: bool [slices]."""
    tops, bottoms, lefts, rights = _bounds(rows)
    meets = np.zeros(len(rows), bool)
    for target in targets:
        [[top], [bottom], [left], [right]] = _bounds(np.array([(*target.row, 0)]))
        meets |= (tops < bottom) & (top < bottoms) & (lefts < right) & (left < rights)
    return meets


def _bounds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the first rows, their ends, the first columns and their ends of the rectangles around slices."""
    tops, _, lefts, rights, starts, stops, _ = rows.T
    widths = np.maximum(rights - lefts, 1)
    return tops + starts // widths, tops + (stops - 1) // widths + 1, lefts, rights


def _read_places(path: Path, key: str, rows: np.ndarray, shapes: Shapes, files: Collection[str]) -> Iterator[Place]:
    kind, _, name = key.partition("/")
    is_vector = len(shapes.get(name, ())) == 1
    for top, bottom, left, right, start, stop, number in rows.tolist():
        box = ((left, right),) if is_vector else ((top, bottom), (left, right))
        piece = StateSlice.parse(StateSlice(cast("StateKind", kind), name, box, start, stop).key)
        require_of_model(path, piece, shapes)
        if (file := shard_name(number)) not in files:
            raise ArtifactError(f"{path}: {piece.key} is in {file}, which the manifest does not list.")
        yield Place(piece, file)
