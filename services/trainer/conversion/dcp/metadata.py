"""Reads `.metadata` of a folder of torch.distributed.checkpoint (DCP), without executing code from the file.

The file is a pickle: `pickle.load`, and so torch's own reader, would run what it names. Here it may name the classes of
DCP's metadata alone, and gets empty classes in their place, made for this file: no code of torch runs, and nothing of
this process can be changed.
"""

from __future__ import annotations

import io
import math
import pickle  # nosec B403 # the unpickler below makes no class but its own
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.common.errors import ArtifactError
from services.common.input.files import read_file, reading_inputs
from services.common.input.problem_list import shorten
from services.common.process.limits import explain_lack

METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "MetadataIndex", "StorageMeta"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
_UNUSED = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}
"""Names of values that are not used: the memory's format, and the path that the checkpoint was saved at."""

MAX_DIMENSIONS = 64
Sizes = tuple[int, ...]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StoredChunk:
    """A rank's rectangular part of a tensor, and the bytes of a file that hold it as `torch.save` wrote it."""

    offsets: Sizes
    sizes: Sizes
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; its chunks have as many values together as the tensor."""

    dtype: torch.dtype
    shape: Sizes
    chunks: tuple[StoredChunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor | None]:
    """Return the tensors of a checkpoint by name, and None for each value that is no tensor.

    Raises `ArtifactError` if the file cannot be read, names anything but DCP's metadata, or contradicts itself.
    """
    path = folder / METADATA
    with reading_inputs(folder):
        content = read_file(path, folder)
    try:
        metadata = _state(_MetadataUnpickler(io.BytesIO(content)).load(), "Metadata")
        files = _index_files(_require(metadata["storage_data"], dict))
        tensors = _require(metadata["state_dict_metadata"], dict)
        return {_require(name, str): _read_tensor(name, value, files) for name, value in tensors.items()}
    except Exception as error:  # a damaged pickle can raise anything
        if (lack := explain_lack(error, path)) is not None:
            raise lack from error
        raise ArtifactError(
            f"{path}: cannot be read as the metadata of torch.distributed.checkpoint: "
            f"{shorten(str(error), 1_000) or type(error).__name__}. It is damaged, or of another format; copy the "
            f"checkpoint again."
        ) from error


class _Record:
    """Stands in for a class of DCP's metadata; a pickle only sets its state."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands in for a class. A pickle can set attributes of what it gets, so each is made for it."""
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if (module, name) in _UNUSED:
            return lambda *_: None
        if module == "torch" and name == "Size":
            return type(name, (tuple,), {})
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of it, and was not run")


def _index_files(storage: Mapping[object, object]) -> dict[tuple[str, Sizes], Mapping[str, Any]]:
    """Return where each chunk is stored, by the name of its tensor and its offsets."""
    places: dict[tuple[str, Sizes], Mapping[str, Any]] = {}
    for index, info in storage.items():
        chunk = _state(index, "MetadataIndex")
        places[_require(chunk["fqn"], str), _sizes(chunk.get("offset") or ())] = _state(info, "_StorageInfo")
    return places


def _read_tensor(name: str, value: object, files: Mapping[tuple[str, Sizes], Mapping[str, Any]]) -> StoredTensor | None:
    if type(value).__name__ == "BytesStorageMetadata":
        return None
    stored = _state(value, "TensorStorageMetadata")
    dtype, *_ = _require(_require(stored["properties"], _Record).state, tuple)
    shape = _sizes(stored["size"])
    chunks = tuple(_read_chunk(name, each, shape, files) for each in stored["chunks"])
    held, expected = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if held != expected:
        raise ValueError(f"{name} has {expected:,} values, and its chunks have {held:,}")
    return StoredTensor(_require(dtype, torch.dtype), shape, chunks)


def _read_chunk(
    name: str, value: object, shape: Sizes, files: Mapping[tuple[str, Sizes], Mapping[str, Any]]
) -> StoredChunk:
    chunk = _state(value, "ChunkStorageMetadata")
    offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
    is_inside = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= length for offset, size, length in zip(offsets, sizes, shape, strict=True)
    )
    if not is_inside:
        raise ValueError(f"{name} is {list(shape)}, and has a chunk of {list(sizes)} at {list(offsets)}")
    if (name, offsets) not in files:
        raise ValueError(f"{name} has a chunk at {list(offsets)} that no file has")
    place = files[name, offsets]
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} is stored with extensions of DCP, such as compression; save it without")
    file = _require(place["relative_path"], str)
    if Path(file).name != file:
        raise ValueError(f"{name} is in {file!r}, expected a file of the checkpoint's own folder")
    start, length = _sizes((place["offset"], place["length"]))
    return StoredChunk(offsets, sizes, file, start, length)


def _state(value: object, name: str) -> Mapping[str, Any]:
    if type(value).__name__ != name or not isinstance(value, _Record):
        raise ValueError(f"it has a {type(value).__name__} in the place of a {name}")
    return _require(value.state or {}, dict)


def _require(value: object, kind: type[Kind]) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _sizes(values: object) -> Sizes:
    numbers = _require(values, tuple)
    if len(numbers) > MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        # The numbers are not shown: what is nested in itself a few times would fill the memory as text.
        raise ValueError(f"it has other values than numbers from 0 on, or more than {MAX_DIMENSIONS} of them, as sizes")
    return tuple(numbers)
