"""Finds and loads a recipe: a TOML file, or the name of one that is shipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.recipe.presets import SHIPPED

if TYPE_CHECKING:
    from services.common.recipe.schema import Recipe


def find_recipe(recipe: str | Path) -> Path:
    """Return the path of a recipe. A bare name that is no file here is that of a shipped recipe: `tiny-cpu`."""
    path = Path(recipe)
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    is_bare = path.parent == Path()
    return shipped if is_bare and not path.is_file() and shipped.is_file() else path


def load_recipe(recipe: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe with overrides, Python's values, such as `{"train.max_steps": 500}`. Raises `RecipeError`."""
    from services.common.recipe.file import load_recipe as load  # noqa: PLC0415 - takes longer than `millrace --help`

    return load(find_recipe(recipe), overrides)
