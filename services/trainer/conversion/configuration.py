"""Reads and writes the configuration of a Hugging Face folder: of the model, of generation and of the tokenizer.

A run that begins with imported weights keeps the configuration of their folder in its checkpoints, and an export has it
again, apart from what the recipe has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.artifacts.checkpoint import ImportedModel
from services.common.artifacts.corpus import Vocabulary
from services.common.errors import ArtifactError, RecipeError
from services.common.input.files import parse_json, read_file, unreadable
from services.common.input.problem_list import shorten
from services.common.recipe.schema import Model, Recipe

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
"""File of transformers before version 5, with special tokens that `tokenizer_config.json` may lack."""
CHAT_TEMPLATE = "chat_template.jinja"
_DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
"""Values of a `config.json` that has none, for settings that follow from the corpus."""
_LIMITS = ("max_position_embeddings", "model_max_length")
"""Settings that an export compares with the length of the corpus's rows."""
_PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Values that every Llama has, and that no recipe can change."""


def read_imported(folder: Path) -> ImportedModel:
    """Read the configuration of a folder. A file that it does not have is empty.

    Raises `ArtifactError` for a file that cannot be read, is no JSON object or has settings that no export can use.
    """
    special = {name: _content_of(token) for name, token in _read_object(folder, SPECIAL_TOKENS).items()}
    tokenizer = {**special, **_read_object(folder, TOKENIZER_CONFIG)}
    if os.path.lexists(folder / CHAT_TEMPLATE):
        try:
            tokenizer["chat_template"] = _read(folder, CHAT_TEMPLATE).decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{folder / CHAT_TEMPLATE}: is no UTF-8 text: {error}. Save it as UTF-8.") from error
    return ImportedModel(
        config=_read_object(folder, CONFIG),
        generation_config=_read_object(folder, GENERATION_CONFIG),
        tokenizer_config=tokenizer,
    )


def _content_of(token: Any) -> Any:
    if isinstance(token, list):
        return [_content_of(each) for each in token]
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    if not os.path.lexists(folder / name):
        return {}
    try:
        value = parse_json(_read(folder, name))
    except ValueError as error:
        raise ArtifactError(f"{folder / name}: cannot be read as JSON: {error}. Download the folder again.") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{folder / name}: is a JSON {type(value).__name__}, expected an object of settings.")
    _require_usable(folder / name, value)
    return value


def _require_usable(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise `ArtifactError` for settings of a wrong type that an export calculates with: training would be done by
    then.
    """
    added = settings.get("added_tokens_decoder") or {}
    problems = [(name, "a number") for name in _LIMITS if not isinstance(settings.get(name), int | float | None)]
    if not isinstance(added, dict) or not all(isinstance(_content_of(each), str) for each in added.values()):
        problems.append(("added_tokens_decoder", "an object with a token for each id"))
    for name, expected in problems[:1]:
        raise ArtifactError(f"{path}: {name} is {shorten(json.dumps(settings[name]), 80)}, expected {expected}.")


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_file(folder / name, folder)
    except OSError as error:
        raise unreadable(folder / name, error) from error


def hugging_face_config(
    recipe: Recipe, model: Model, vocabulary: Vocabulary, dtype: str, imported: ImportedModel | None = None
) -> dict[str, Any]:
    """Describe `model`, which is the recipe's with the rows of an export, as transformers' LlamaConfig does.

    Settings of the imported model stay as they were, where they mean what the recipe says or where it says nothing.
    """
    config = _describe_recipe(recipe, model, vocabulary)
    if imported and imported.config:
        config = _restore(imported.config, config, recipe.corpus.sequence_length)
    names = config.keys() & {"dtype", "torch_dtype"}
    return config | dict.fromkeys(names or ("dtype", "torch_dtype"), dtype)


def _describe_recipe(recipe: Recipe, model: Model, vocabulary: Vocabulary) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        rope |= {"rope_type": "llama3", **model.rope_scaling.model_dump()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_describe_model(model),
        "initializer_range": model.initializer_range,
        "head_dim": model.head_dim,
        "max_position_embeddings": recipe.corpus.sequence_length,
        # transformers 5 reads rope_parameters; transformers 4 reads the two keys after it.
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling else None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": None,
    }


_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
"""Keys of the two forms that transformers has for rotary positions."""


def _restore(theirs: Mapping[str, Any], ours: Mapping[str, Any], sequence_length: int) -> dict[str, Any]:
    """Return the imported configuration with the settings in which the recipe differs from it."""
    config = dict(theirs)
    if sequence_length > (config.get("max_position_embeddings") or _DEFAULTS["max_position_embeddings"]):
        config["max_position_embeddings"] = sequence_length
    before, now = _describe(config), _describe(ours)
    changed = {name for name in now if before[name] != now[name]}
    if changed & set(_ROPE):
        config = {name: value for name, value in config.items() if name not in _ROPE}
        config |= {name: ours[name] for name in _ROPE}
    config |= {name: ours[name] for name in changed - set(_ROPE)}
    absent = _DEFAULTS.keys() - theirs.keys() - {"max_position_embeddings"}
    return config | {name: ours[name] for name in absent if ours[name] != _DEFAULTS[name]}


def require_same_model(folder: Path, model: Model) -> None:
    """Raise `RecipeError` with every difference, unless `config.json` describes the recipe's model."""
    path = folder / CONFIG
    try:
        theirs = _describe(parse_json(_read(folder, CONFIG)))
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ArtifactError(f"{path}: cannot be read as a Llama's configuration: {error}.") from error
    ours = {**_describe_model(model), "head_dim": model.head_dim, **_PLAIN}
    ours |= {"rope_theta": model.rope_theta, "rope_scaling": model.rope_scaling and model.rope_scaling.model_dump()}
    differences = [
        f"  {name}: {path.name} has {json.dumps(theirs[name])}, the recipe's model {json.dumps(value)}"
        for name, value in ours.items()
        if theirs[name] != value
    ]
    rows = theirs["vocab_size"]
    if isinstance(rows, int) and rows > model.vocab_size and rows != model.num_vocab_rows:
        differences.append(f"Set model.padded_vocab_size = {rows} for a model with more rows than its tokenizer's ids.")
    if differences:
        raise RecipeError(f"{folder}: is not the recipe's model:\n" + "\n".join(differences))


def _describe_model(model: Model) -> dict[str, Any]:
    """Return the recipe's values that have the same name and form in `config.json`."""
    own = {"preset", "padded_vocab_size", "initializer_range", "rope_scaling", "rope_theta"}
    return {**model.model_dump(mode="json", exclude=own), "vocab_size": model.num_vocab_rows}


def _describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `config.json` under the recipe's names; absent keys have transformers' defaults."""
    heads = config.get("num_attention_heads")
    # Of the two forms transformers reads `rope_scaling` first, and `rope_theta` beside it where it has none.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
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
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "rope_scaling": _describe_scaling(rope, config.get("max_position_embeddings")),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def _describe_scaling(rope: Mapping[str, Any], max_positions: int | None) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        return {"rope_type": kind}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {name: rope.get(name, max_positions if name == names[-1] else None) for name in names}
