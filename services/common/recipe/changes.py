"""Which fields of two recipes tell what is made from them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from services.common.recipe.schema import Constant, Identity, Kind, Recipe

_MOST_SHOWN = 80
"""Characters of a value that are shown of one field."""
_ABSENT = object()


def changed_fields(stored: Mapping[str, Any], recipe: Recipe, kind: Kind) -> list[str]:
    """The fields that decide the bytes of an artifact of this kind and have another value in a stored recipe, each with
    both values. A field that the stored recipe does not have counts as equal.
    """
    resolved, changed = recipe.model_dump(mode="json"), []
    for name in _marked_names(recipe, kind):
        before, now = _look_up(stored, name), _look_up(resolved, name)
        if before is not _ABSENT and before != now:
            changed.append(f"{name} was {_show(before)} and is {_show(now)}")
    return changed


def _marked_names(section: BaseModel, kind: Kind, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that are marked as part of what artifacts of this kind are made from."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if any(isinstance(mark, Constant) and kind in mark.kinds for mark in field.metadata):
            continue
        is_marked = any(isinstance(mark, Identity) and kind in mark.kinds for mark in field.metadata)
        if is_marked and isinstance(value, BaseModel):
            # A preset is a way of writing the other fields.
            yield from (f"{prefix}{name}.{each}" for each in type(value).model_fields if each != "preset")
        elif is_marked:
            yield prefix + name
        elif isinstance(value, BaseModel):
            yield from _marked_names(value, kind, f"{prefix}{name}.")


def _look_up(values: Any, dotted_name: str) -> Any:
    for key in dotted_name.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return _ABSENT
        values = values[key]
    return values


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 4]} ..."
