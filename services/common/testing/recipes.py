"""Makes the small recipe of all tests: a model of a few thousand parameters, and a source that does not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.recipe.file import load_recipe, read_value
from services.common.recipe.schema import Recipe

_SMALL: dict[str, dict[str, Any]] = {
    "": {"name": "small"},
    "corpus": {"name": "sentences", "sequence_length": 16, "sources": [{"uri": "nowhere"}]},
    "tokenizer.train": {"vocab_size": 300},
    "model": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "optimizer": {"learning_rate": 1e-2, "min_learning_rate": 1e-3, "warmup_steps": 2, "decay_steps": 20},
    "train": {"max_steps": 20},
}


def recipe_text(**changes: Any) -> str:
    """Return the small recipe as TOML, with changes such as `train__max_steps=7`; None leaves a key or section out."""
    sections = {name: dict(values) for name, values in _SMALL.items()}
    for name, value in changes.items():
        dotted = name.replace("__", ".")
        section, _, key = dotted.rpartition(".")
        if value is not None:
            sections.setdefault(section, {})[key] = value
        elif dotted in sections:
            del sections[dotted]
        else:
            del sections[section][key]
    return "\n".join(
        (f"[{name}]\n" if name else "") + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def write_recipe(folder: Path, **changes: Any) -> Path:
    """Write the small recipe to a file, with changes as in `recipe_text`."""
    path = folder / "small.toml"
    path.write_text(recipe_text(**changes), encoding="utf-8")
    return path


def make_recipe(folder: Path, **overrides: str) -> Recipe:
    """Write the small recipe and load it with overrides as in `load_with`."""
    return load_with(write_recipe(folder), **overrides)


def load_small(folder: Path, overrides: Mapping[str, str], **changes: Any) -> Recipe:
    """Write the small recipe with changes, and load it with overrides by dotted name."""
    return load_recipe(write_recipe(folder, **changes), read_texts(overrides))


def load_with(path: Path, **overrides: str) -> Recipe:
    """Load a recipe with overrides as on a command line, such as `train__max_steps="7"`."""
    return load_recipe(path, read_texts({name.replace("__", "."): text for name, text in overrides.items()}))


def read_texts(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of overrides that a command line has as texts."""
    return {name: read_value(text) for name, text in overrides.items()}


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
