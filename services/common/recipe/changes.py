"""Compares recipes: by the fields that decide an artifact's bytes, or by all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.common.recipe.schema import Recipe, identity
from services.common.recipe.section import Kind

MAX_SHOWN_CHARACTERS = 80
"""Characters of a field's value that a message shows."""


def changed_fields(stored: Mapping[str, Any], recipe: Recipe, kind: Kind) -> list[str]:
    """Describe the fields that decide the bytes of an artifact of this kind and differ between a stored recipe and now.

    Raises `pydantic.ValidationError` where this program does not read the stored recipe.
    """
    recipes = Recipe.model_validate(stored), recipe
    before, now = (dict(flatten(identity(each, kind))) for each in recipes)
    was, become = (
        dict(flatten(each.model_dump(mode="json"))) for each in recipes
    )  # with defaults, which ids leave out
    return [
        f"{name} was {_show(was.get(name))} and is {_show(become.get(name))}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def differing_values(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the dotted name, and the value in each recipe, of all fields that are not the same in all recipes."""
    flat = [dict(flatten(recipe)) for recipe in recipes]
    names = dict.fromkeys(name for recipe in flat for name in recipe)
    shown = {name: [_show(recipe[name]).strip('"') if name in recipe else "-" for recipe in flat] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field."""
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 4]} ..."
