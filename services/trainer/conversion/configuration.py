"""Reads and writes the configuration of a Hugging Face folder: of the model, of generation and of the tokenizer.

A run that begins with imported weights keeps the configuration of their folder in its checkpoints, and an export has it
again, apart from what the recipe has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from services.common.artifacts.checkpoint import ImportedModel
from services.common.artifacts.corpus import Vocabulary
from services.common.errors import ArtifactError, RecipeError
from services.common.recipe.schema import Model, Recipe

Dtype = Literal["float32", "bfloat16", "float16"]
"""A type of exported weights, by torch's name."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
"""File of transformers before version 5, with special tokens that `tokenizer_config.json` may lack."""
CHAT_TEMPLATE = "chat_template.jinja"


def read_imported(folder: Path) -> ImportedModel:
    """Read the configuration of a folder. A file that it does not have is empty.

    Raises `ArtifactError` for a file that is no JSON object.
    """
    special = {name: _content_of(token) for name, token in _read_object(folder / SPECIAL_TOKENS).items()}
    tokenizer = {**special, **_read_object(folder / TOKENIZER_CONFIG)}
    if (folder / CHAT_TEMPLATE).exists():
        tokenizer["chat_template"] = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    return ImportedModel(
        config=_read_object(folder / CONFIG),
        generation_config=_read_object(folder / GENERATION_CONFIG),
        tokenizer_config=tokenizer,
    )


def cut_ids(imported: ImportedModel, num_rows: int) -> ImportedModel:
    """Return the configuration without special tokens whose ids have no row in a model of `num_rows`."""
    config, generation = (_with_rows(each, num_rows) for each in (imported.config, imported.generation_config))
    gone = {name.removesuffix("_id") for name in imported.config.keys() - config.keys()}
    tokenizer = {name: value for name, value in imported.tokenizer_config.items() if name not in gone}
    if added := tokenizer.get("added_tokens_decoder"):
        tokenizer["added_tokens_decoder"] = {number: each for number, each in added.items() if int(number) < num_rows}
    return ImportedModel(config=config, generation_config=generation, tokenizer_config=tokenizer)


def _with_rows(settings: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return the settings without those of the ids of special tokens from `num_rows` on."""
    ids = {
        name: value if isinstance(value, list) else [value]
        for name, value in settings.items()
        if name.endswith("_token_id")
    }
    gone = [name for name, each in ids.items() if any(isinstance(one, int) and one >= num_rows for one in each)]
    return {name: value for name, value in settings.items() if name not in gone}


def _content_of(token: Any) -> Any:
    if isinstance(token, list):
        return [_content_of(each) for each in token]
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
        problem = f"a JSON {type(value).__name__}"
    except ValueError as error:
        problem = str(error)
    raise ArtifactError(f"{path}: {problem}, expected an object of settings. Download it again.")


def export_config(
    recipe: Recipe, model: Model, vocabulary: Vocabulary, dtype: str, imported: ImportedModel | None
) -> dict[str, Any]:
    """Return `config.json` of `model`, which is the recipe's with the rows of an export.

    Settings of the imported model stay as they were, where the recipe says nothing about them.
    """
    from transformers import LlamaConfig, Qwen3Config  # noqa: PLC0415 - takes seconds

    theirs = imported.config if imported else {}
    layers = {"num_hidden_layers": model.num_hidden_layers}  # of which Qwen3's has a list
    config = (Qwen3Config if model.qk_norm else LlamaConfig).from_dict({**theirs, **layers})
    length = recipe.corpus.sequence_length
    config.update(
        {
            **_describe(model),
            "architectures": ["Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"],
            "dtype": dtype,
            "max_position_embeddings": max(config.max_position_embeddings, length) if theirs else length,
        }
    )
    own = {
        "initializer_range": model.initializer_range,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
    }
    config.update({name: value for name, value in own.items() if name not in theirs})
    rope: Any = config.rope_parameters
    # transformers 5 reads the keys of `to_dict`; transformers 4 reads these.
    legacy = {
        "torch_dtype": dtype,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope if model.rope_scaling else None,
    }
    return {**json.loads(config.to_json_string()), **legacy}


def require_same_model(folder: Path, model: Model) -> None:
    """Raise `RecipeError` with every difference, unless `config.json` describes the recipe's model."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    try:
        theirs = AutoConfig.from_pretrained(folder).to_dict()  # nosec B615 # a folder of this machine
    except Exception as error:  # those of JSON, of its own validators and of their causes
        raise ArtifactError(f"{folder / CONFIG}: not a model's configuration: {error}.") from error
    family, option = ("qwen3", "use_sliding_window") if model.qk_norm else ("llama", "mlp_bias")
    ours = {**_describe(model), "model_type": family, "hidden_act": "silu", "attention_bias": False, option: False}
    rope = theirs.get("rope_parameters") or {}
    theirs["rope_parameters"] = {name: rope.get(name) for name in ours["rope_parameters"]}
    differences = [
        f"  {name}: {CONFIG} has {json.dumps(theirs.get(name))}, the recipe's model {json.dumps(value)}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    rows = theirs.get("vocab_size") or 0
    if rows > model.vocab_size and rows != model.num_vocab_rows:
        differences.append(f"Set model.padded_vocab_size = {rows} for a model with more rows than its tokenizer's ids.")
    if differences:
        raise RecipeError(f"{folder}: is not the recipe's model:\n" + "\n".join(differences))


def _describe(model: Model) -> dict[str, Any]:
    """Return the settings of a `LlamaConfig` or `Qwen3Config` that decide what the model computes."""
    own = {"preset", "padded_vocab_size", "initializer_range", "qk_norm", "rope_scaling", "rope_theta"}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        rope |= {"rope_type": "llama3", **model.rope_scaling.model_dump()}
    return {
        **model.model_dump(mode="json", exclude=own),
        "vocab_size": model.num_vocab_rows,
        "rope_parameters": rope,
    }
