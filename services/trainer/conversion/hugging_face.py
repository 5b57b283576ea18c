"""Hugging Face's folder of a Llama: its configuration, both ways, and the weights of one that is read."""

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

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import write_durably
from services.common.errors import ArtifactError, RecipeError
from services.common.input.files import InputFileError, parse_json, read_file, require_regular_file, unreadable
from services.common.input.problem_list import list_names, shorten
from services.common.process.limits import explain_lack
from services.common.recipe.schema import Model, Recipe

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILE_ELEMENTS = 2**30
"""Of a file that is written, at most: 4 GiB, as much as a process that writes one has in memory."""
DTYPES = ("F32", "BF16", "F16")


def hugging_face_config(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, Any]:
    """The model as transformers' LlamaConfig describes it."""
    model = recipe.model.model_dump(mode="json", exclude={"preset", "rope_scaling", "rope_theta"})
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": recipe.model.rope_theta}
    if recipe.model.rope_scaling:
        rope |= {"rope_type": "llama3", **recipe.model.rope_scaling.model_dump()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **model,
        "head_dim": recipe.model.head_dim,
        "max_position_embeddings": recipe.corpus.sequence_length,
        # transformers 5 reads rope_parameters, 4 the two keys after it.
        "rope_parameters": rope,
        "rope_theta": recipe.model.rope_theta,
        "rope_scaling": rope if recipe.model.rope_scaling else None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def require_same_model(folder: Path, model: Model) -> None:
    """Raise `RecipeError` with every difference, unless `config.json` describes the recipe's model."""
    path = folder / CONFIG
    try:
        config = parse_json(read_file(path, folder))
        theirs = _describe(config)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ArtifactError(f"{path}: cannot be read as a Llama's configuration: {error}.") from error
    ours: dict[str, Any] = model.model_dump(mode="json", exclude={"preset", "initializer_range"})
    ours |= {"head_dim": model.head_dim, **_PLAIN}
    differences = [
        f"  {name}: {path.name} has {json.dumps(theirs[name])}, the recipe's model {json.dumps(value)}"
        for name, value in ours.items()
        if theirs[name] != value
    ]
    if differences:
        raise RecipeError(f"{folder}: is another model than the recipe's:\n" + "\n".join(differences))


_PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""What every Llama has, and a program of ours no choice of."""


def _describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's names and what `config.json` says of each, where a key that is absent has transformers' default."""
    heads = config.get("num_attention_heads")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    scaling = config.get("rope_scaling") or rope
    return {
        "model_type": config.get("model_type"),
        "hidden_act": config.get("hidden_act", "silu"),
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "vocab_size": config.get("vocab_size"),
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "num_hidden_layers": config.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (config.get("hidden_size") or 0) // (heads or 1),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "rope_scaling": _describe_scaling(scaling),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def _describe_scaling(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        return {"rope_type": kind}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {name: scaling.get(name) for name in names}


def group_parameters(shapes: Mapping[str, torch.Size], max_elements: int) -> list[list[str]]:
    """Names of the parameters that go into one file each: of no more elements, or one parameter that has more."""
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
    folder: Path, shapes: Mapping[str, torch.Size], read: Callable[[Sequence[str]], Mapping[str, Tensor]]
) -> None:
    """Write weights as `save_pretrained` does: in one file, or in several and an index. `read` gives those of one."""
    groups = group_parameters(shapes, FILE_ELEMENTS)
    places: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_durably(folder / file, safetensors.torch.save(dict(read(names)), metadata={"format": "pt"}))
        places |= dict.fromkeys(names, file)
    if len(groups) > 1:
        size = 4 * sum(shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        write_durably(folder / INDEX, json.dumps(index, indent=2).encode())


@contextmanager
def open_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[Callable[[str], Tensor]]:
    """The weights in a folder, in one file or in those that an index names: a function that reads one, as float32.

    Raises `ArtifactError` unless they are those of `shapes`, of a type that float32 holds exactly, and, as one is read,
    for values that are not finite: with them every step would be skipped.
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


def require_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise `ArtifactError` for a weight with values that no training begins with."""
    num_bad = int((~torch.isfinite(tensor)).sum())
    if num_bad:
        raise ArtifactError(
            f"{folder}: {name}: {num_bad:,} of {tensor.numel():,} values are NaN or infinite, expected weights that "
            f"can be trained on. Fetch or convert them again."
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
    raise ArtifactError(f"{folder / file}: missing, and {INDEX} names it. Fetch the folder again, whole.")


def _open(folder: Path, file: str) -> Any:
    path = folder / file
    try:
        require_regular_file(path, folder)
        return safetensors.safe_open(path, "pt")
    except InputFileError as error:
        raise unreadable(path, error) from error
    except (safetensors.SafetensorError, OSError, ValueError, MemoryError) as error:
        raise explain_lack(error, path) or ArtifactError(
            f"{path}: cannot be read as safetensors: {error}. If it is damaged, fetch it again; convert other formats "
            f"with transformers' `save_pretrained`."
        ) from error


def _require_shapes(folder: Path, files: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    unknown = [name for name in files if name not in shapes and not _is_stored_twice(name)]
    missing = [name for name in shapes if name not in files]
    if unknown or missing:
        raise ArtifactError(
            f"{folder}: holds other weights than the recipe's model: {len(missing)} missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown ({', '.join(unknown[:3]) or 'none'})."
        )
    for name, shape in shapes.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != tuple(shape) or found.get_dtype() not in DTYPES:
            raise ArtifactError(
                f"{folder}: {name} is {found.get_dtype()} {found.get_shape()}, expected {list(shape)} of "
                f"{', '.join(DTYPES)}."
            )


def _is_stored_twice(name: str) -> bool:
    """A tied head is the embedding; rotary frequencies, which some versions stored, follow from the configuration."""
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")
