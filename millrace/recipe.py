"""Finds and loads a recipe: a TOML file, or the name of one that is shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.common.recipe.schema import Recipe

SHIPPED = Path(__file__).parents[1] / "recipes"


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe. A bare name that is no file here is that of a shipped recipe: `tiny-cpu`."""
    path = Path(recipe)
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    is_bare = path.parent == Path()
    return shipped if is_bare and not path.is_file() and shipped.is_file() else path


def load_recipe(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe with overrides such as `{"train.max_steps": 500}`. Raises `RecipeError`."""
    from services.common.recipe.file import load_recipe as load  # noqa: PLC0415 - takes longer than `millrace --help`

    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (overrides or {}).items()}
    return load(find_recipe(recipe), texts)
