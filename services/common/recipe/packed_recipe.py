"""Recipes as text for an environment variable, by which a job carries its recipe to nodes without a shared file system.

The text is the zlib-compressed file in base64.
"""

from __future__ import annotations

import base64
import zlib

from services.common.errors import RecipeError

RECIPE_VARIABLE = "MILLRACE_RECIPE"
"""Environment variable that carries the recipe, because the submitting machine cannot write to the file system."""
MAX_RECIPE_CHARACTERS = 16_384
"""Largest packed recipe, in characters. A whole job definition of AWS Batch has at most 24 KiB (service quotas)."""


def pack_recipe(content: bytes) -> str:
    """Pack a recipe into a value of RECIPE_VARIABLE. Raises `RecipeError` for a recipe that is too large."""
    packed = base64.b64encode(zlib.compress(content, level=9)).decode("ascii")
    if len(packed) > MAX_RECIPE_CHARACTERS:
        raise RecipeError(
            f"the recipe has {len(packed):,} characters when packed, more than the {MAX_RECIPE_CHARACTERS:,} of a job. "
            f"Remove comments, or use a shorter recipe and override its values with ARGS="
        )
    return packed


def unpack_recipe(packed: str) -> bytes:
    """Unpack a recipe. Raises `RecipeError` for a text that `pack_recipe` did not make."""
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True))
    except (ValueError, zlib.error) as error:
        raise RecipeError(f"{RECIPE_VARIABLE} is not a packed recipe ({error}). Submit the job again.") from error
