"""Reads and writes the weights in a Hugging Face folder of a Llama or Qwen3."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from services.common.errors import ArtifactError, RecipeError
from services.common.program.initial_weights import VOCABULARY_WEIGHTS

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = VOCABULARY_WEIGHTS
FILE_ELEMENTS = 2**30
"""Largest number of elements in a file that is written: 4 GiB of float32. Writing needs twice that memory."""
WEIGHT_DTYPES = ("F32", "BF16", "F16", torch.float32, torch.bfloat16, torch.float16)
"""Safetensors' and torch's names of the types whose values float32 holds exactly."""


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
    folder: Path, shapes: Mapping[str, torch.Size], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """Write weights as `save_pretrained` does: in one file, or in several with an index. `read` returns `dtype`."""
    groups = group_parameters(shapes, FILE_ELEMENTS)
    places: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        content = safetensors.torch.save({name: read(name) for name in names}, metadata={"format": "pt"})
        (folder / file).write_bytes(content)  # `save_file` raises no OSError on a full disk
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        size = dtype.itemsize * sum(shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


class HuggingFaceWeights:
    """The weights in a folder, in one file or in those of an index.

    Raises `ArtifactError` unless they have the names and `shapes`, and a type that float32 holds exactly; `RecipeError`
    for a tied head that is not the embedding.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, torch.Size], opened: ExitStack) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in _file_names(folder):
            try:
                tensors = opened.enter_context(safetensors.safe_open(folder / file, "pt"))
            except safetensors.SafetensorError as error:
                raise ArtifactError(f"{folder / file}: damaged: {error}. Download it again.") from error
            self._files |= dict.fromkeys(tensors.keys(), tensors)
        headers = {name: tensors.get_slice(name) for name, tensors in self._files.items()}
        require_model(folder, {name: (each.get_dtype(), each.get_shape()) for name, each in headers.items()}, shapes)
        require_tied(folder, shapes, self._files, self.read)

    def read(self, name: str) -> Tensor:
        """Read a weight as float32. Raises `ArtifactError` for values that are not finite."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return require_finite(self._folder, name, tensor).float()


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{index}: not an index of weights: {error!r}. Download it again.") from error
    if not (folder / WEIGHTS).exists():
        raise ArtifactError(
            f"{folder}: has neither {WEIGHTS} nor {INDEX}. Convert other formats with transformers' `save_pretrained`."
        )
    return [WEIGHTS]


def require_model(
    folder: Path, found: Mapping[str, tuple[object, Sequence[int]]], shapes: Mapping[str, torch.Size]
) -> None:
    """Raise `ArtifactError` unless the tensors, each with its type and shape, are the weights of the model."""
    require_names(folder, found, shapes)
    for name, shape in shapes.items():
        dtype, size = found[name]
        if tuple(size) != tuple(shape) or dtype not in WEIGHT_DTYPES:
            raise ArtifactError(
                f"{folder}: {name} is {dtype} {list(size)}, expected {list(shape)} of float32, bfloat16 or float16."
            )


def require_names(folder: Path, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise `ArtifactError` unless there are the expected tensors, and no others that are not redundant."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not _is_redundant(name)]
    if missing or unknown:
        raise ArtifactError(
            f"{folder}: does not hold the weights of the recipe's model: {len(missing)} missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})."
        )


def _is_redundant(name: str) -> bool:
    """A tied head is the embedding, as `require_tied` makes sure, and rotary frequencies are configured."""
    return name == HEAD or name.endswith(".rotary_emb.inv_freq")


def require_tied(folder: Path, shapes: Container[str], found: Container[str], read: Callable[[str], Tensor]) -> None:
    """Raise `RecipeError` where the weights found for a tied model have a head that is not their embedding."""
    if HEAD in found and HEAD not in shapes and not torch.equal(read(HEAD), read(EMBEDDING)):
        raise RecipeError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, and model.tie_word_embeddings has them tied. transformers "
            f"keeps both, whatever config.json says: set tie_word_embeddings = false there and in the recipe's model."
        )


def require_finite(
    folder: Path, name: str, tensor: Tensor, advice: str = "Download or convert the weights again."
) -> Tensor:
    """Return the tensor. Raises `ArtifactError`, which ends with `advice`, for values that are NaN or infinite."""
    if num_bad := int((~torch.isfinite(tensor)).sum()):
        raise ArtifactError(f"{folder}: {name}: {num_bad:,} of {tensor.numel():,} values are NaN or infinite. {advice}")
    return tensor
