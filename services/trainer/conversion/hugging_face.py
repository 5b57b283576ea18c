"""Reads and writes the weights in a Hugging Face folder of a Llama."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from services.common.artifacts.manifest import write_durably
from services.common.errors import ArtifactError
from services.common.input.files import InputFileError, parse_json, read_file, require_regular_file, unreadable
from services.common.input.problem_list import list_names, shorten
from services.common.process.limits import explain_lack

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_ELEMENTS = 2**30
"""Largest number of elements in a file that is written: 4 GiB, which is also the memory that writing needs."""
DTYPES = ("F32", "BF16", "F16")


def group_parameters(shapes: Mapping[str, torch.Size], max_elements: int) -> list[list[str]]:
    """Group the names of parameters by file, with at most `max_elements` in a file or a single larger parameter."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if groups[-1] and size + shape.numel() > max_elements:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += shape.numel()
    return groups


def write_weights(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
) -> None:
    """Write weights as `save_pretrained` does: in one file, or in several with an index.

    `read` returns the weights of one file by their names, in `dtype`.
    """
    groups = group_parameters(shapes, FILE_ELEMENTS)
    places: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_durably(folder / file, safetensors.torch.save(dict(read(names)), metadata={"format": "pt"}))
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        size = dtype.itemsize * sum(shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        write_durably(folder / INDEX, json.dumps(index, indent=2).encode())


@contextmanager
def open_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[Callable[[str], Tensor]]:
    """Open the weights in a folder, in one file or in those of an index; yield a function that reads one as float32.

    Raises `ArtifactError` unless the weights have the names and `shapes`, and a type that float32 holds exactly. The
    function raises it for values that are not finite, with which every step would be skipped.
    """
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for file in _file_names(folder):
            _require_there(folder, file)
            tensors = opened.enter_context(_open(folder, file))
            files |= dict.fromkeys(tensors.keys(), tensors)
        _require_shapes(folder, files, shapes)

        def read(name: str) -> Tensor:
            tensor: Tensor = files[name].get_tensor(name)
            require_finite(folder, name, tensor)
            return tensor.float()

        yield read


def require_all_and_no_more(folder: Path, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise `ArtifactError` unless both lists are empty: weights of the model, and tensors that are none of them."""
    if missing or unknown:
        raise ArtifactError(
            f"{folder}: does not hold the weights of the recipe's model: {len(missing)} missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})."
        )


def require_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise `ArtifactError` for a weight with values that are NaN or infinite."""
    num_bad = int((~torch.isfinite(tensor)).sum())
    if num_bad:
        raise ArtifactError(
            f"{folder}: {name}: {num_bad:,} of {tensor.numel():,} values are NaN or infinite, expected finite "
            f"weights. Download or convert them again."
        )


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if not os.path.lexists(index):
        return [WEIGHTS]
    try:
        files = sorted({str(each) for each in parse_json(read_file(index, folder))["weight_map"].values()})
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index}: cannot be read as an index of weights: {error}.") from error
    for file in files:
        if Path(file).name != file:
            raise ArtifactError(f"{index}: names {shorten(repr(file), 400)}, expected files of its own folder.")
    return files


def _require_there(folder: Path, file: str) -> None:
    if os.path.lexists(folder / file):
        return
    if file == WEIGHTS:
        found = list_names(sorted(path.name for path in folder.iterdir()))
        raise ArtifactError(
            f"{folder}: has neither {WEIGHTS} nor {INDEX}, only {found}. Convert other formats with transformers' "
            f"`save_pretrained`."
        )
    raise ArtifactError(f"{folder / file}: missing, but {INDEX} names it. Download the whole folder again.")


def _open(folder: Path, file: str) -> Any:
    path = folder / file
    try:
        require_regular_file(path, folder)
        return safetensors.safe_open(path, "pt")
    except InputFileError as error:
        raise unreadable(path, error) from error
    except (safetensors.SafetensorError, OSError, ValueError, MemoryError) as error:
        raise explain_lack(error, path) or ArtifactError(
            f"{path}: cannot be read as safetensors: {error}. If it is damaged, download it again; convert other "
            f"formats with transformers' `save_pretrained`."
        ) from error


def _require_shapes(folder: Path, files: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    unknown = [name for name in files if name not in shapes and not is_stored_twice(name)]
    require_all_and_no_more(folder, [name for name in shapes if name not in files], unknown)
    for name, shape in shapes.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != tuple(shape) or found.get_dtype() not in DTYPES:
            raise ArtifactError(
                f"{folder}: {name} is {found.get_dtype()} {found.get_shape()}, expected {list(shape)} of "
                f"{', '.join(DTYPES)}."
            )


def is_stored_twice(name: str) -> bool:
    """Return whether a weight is redundant: a tied head is the embedding, rotary frequencies are configured."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
