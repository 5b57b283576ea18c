"""Reads the weights of a folder of torch.distributed.checkpoint (DCP), as torchtitan and FSDP runs save it.

Names are Hugging Face's or torchtitan's, whose `output` became `lm_head` and `attention.wq` became
`attention.qkv_linear.wq` (0.3.0). torchtitan's Llama rotates pairs of neighbours of a head, (0, 1), (2, 3) and so on,
where Hugging Face's rotates (0, N / 2), (1, N / 2 + 1); so the rows of its queries and keys have another order. Its
Qwen3 rotates as Hugging Face's.
"""

from __future__ import annotations

import io
import math
import pickle  # nosec B403 # `find_class` below allows nothing but DCP's metadata
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from services.common.errors import ArtifactError
from services.common.problem_list import list_names
from services.common.program.transformer import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.hugging_face import require_finite, require_model, require_tied

METADATA = ".metadata"
HUGGING_FACE, TORCHTITAN = "model.embed_tokens.weight", "tok_embeddings.weight"
"""The embedding's name tells whose names they are, and what is in front of them."""
COMPANIONS = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
"""First parts of names beside a model's: the rest of a training state, and torchtitan's table of rotary positions."""

_RENAMES = (
    (r"^tok_embeddings\b", "model.embed_tokens"),
    (r"^(norm|layers)\b", r"model.\1"),
    (r"^output\b", "lm_head"),
    (r"\battention\.(?:qkv_linear\.)?w([qkvo])\b", r"self_attn.\1_proj"),
    (r"\battention\.([qk])_norm\b", r"self_attn.\1_norm"),
    (r"\bfeed_forward\.w1\b", "mlp.gate_proj"),
    (r"\bfeed_forward\.w2\b", "mlp.down_proj"),
    (r"\bfeed_forward\.w3\b", "mlp.up_proj"),
    (r"\battention_norm\b", "input_layernorm"),
    (r"\bffn_norm\b", "post_attention_layernorm"),
)
"""Parts of torchtitan's names, and those of Hugging Face's."""
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}


class DcpWeights:
    """Joins full weights from the chunks of all ranks, one weight at a time.

    Raises `ArtifactError` unless the checkpoint has the model's weights, and `RecipeError` for a tied head that is not
    the embedding.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self._folder, self._model, self._reader = folder, model, _Reader(folder)
        tensors = {
            name: stored
            for name, stored in self._reader.metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._names, self.is_torchtitans = find_model(folder, tensors)
        self._found, shapes = {name: tensors[stored] for name, stored in self._names.items()}, parameter_shapes(model)
        require_model(folder, {name: (each.properties.dtype, each.size) for name, each in self._found.items()}, shapes)
        require_tied(folder, shapes, self._found, self.read)

    def read(self, name: str) -> Tensor:
        """Read a full parameter by Hugging Face's name, in float32."""
        stored = self._names[name]
        weight = torch.full(self._found[name].size, math.nan)  # values that no chunk has are seen as not finite
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # there is no process group
                planner = DefaultLoadPlanner(flatten_state_dict=False)
                load({stored: weight}, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise ArtifactError(f"{self._folder}: {stored}: {cause}. Copy the checkpoint again.") from error
        require_finite(self._folder, stored, weight)
        has_pairs = self.is_torchtitans and not self._model.qk_norm
        return pair_halves(name, weight, self._model) if has_pairs else weight


class _Reader(FileSystemReader):
    """torch's reader, with metadata that is loaded once and runs no code, and with checksums that are compared."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        content = (folder / METADATA).read_bytes()
        try:
            self.metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            self.metadata.state_dict_metadata.items()
        except Exception as error:  # a damaged pickle can raise anything
            raise ArtifactError(f"{folder / METADATA}: not DCP's metadata: {error}. Copy it again.") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        content = io.BytesIO(super()._slice_file(file, sinfo).read())
        with zipfile.ZipFile(content) as archive:  # torch.save writes checksums, and torch.load ignores them
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{sinfo.relative_path} at byte {sinfo.offset:,}: checksum of {damaged} differs")
        content.seek(0)
        return content


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of it")


def find_model(folder: Path, names: Iterable[str]) -> tuple[dict[str, str], bool]:
    """Return the stored names of a model by Hugging Face's names, and whether the stored ones are torchtitan's.

    Raises `ArtifactError` unless the checkpoint has one model.
    """
    candidates = [name for name in names if _is_model(name)]
    embeddings = {
        name: kind for name in candidates for kind in (HUGGING_FACE, TORCHTITAN) if f".{name}".endswith(f".{kind}")
    }
    if len(embeddings) != 1:
        raise ArtifactError(f"{folder}: has {list_names(embeddings)}, expected one {HUGGING_FACE} or {TORCHTITAN}.")
    [(embedding, kind)] = embeddings.items()
    prefix = embedding.removesuffix(kind)
    own = {name.removeprefix(prefix): name for name in candidates if name.startswith(prefix)}
    own = {name: stored for name, stored in own.items() if _is_model(name)}
    if kind == HUGGING_FACE:
        return own, False
    return {_hugging_face_name(name): stored for name, stored in own.items()}, True


def pair_halves(name: str, weight: Tensor, model: Model) -> Tensor:
    """Order the rows of torchtitan's queries or keys as Hugging Face does; other weights stay as they are."""
    if not name.endswith((".q_proj.weight", ".k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _is_model(name: str) -> bool:
    return name.partition(".")[0] not in COMPANIONS


def _hugging_face_name(name: str) -> str:
    """Return the name of torchtitan's weight."""
    for theirs, ours in _RENAMES:
        name = re.sub(theirs, ours, name)
    return name
