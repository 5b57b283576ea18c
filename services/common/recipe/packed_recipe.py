"""Packs a recipe into an environment variable, for a container whose file system does not have the recipe yet."""

from __future__ import annotations

import base64
import binascii
import zlib

from services.common.errors import RecipeError

RECIPE_VARIABLE = "MILLRACE_RECIPE"
"""Environment variable that carries the recipe, because the submitting machine cannot write to the file system."""
MOST_RECIPE_CHARACTERS = 16_384
"""Largest packed recipe, in characters. A whole job definition of AWS Batch has at most 24 KiB (service quotas)."""
MOST_RECIPE_BYTES = 2**20
"""Largest recipe, in bytes: a few packed characters can expand to gigabytes."""


def pack_recipe(content: bytes) -> str:
    """Pack a recipe into a value of RECIPE_VARIABLE. Raises `RecipeError` for a recipe that is too large."""
    packed = base64.b64encode(zlib.compress(content, level=9)).decode("ascii")
    if len(packed) > MOST_RECIPE_CHARACTERS or len(content) > MOST_RECIPE_BYTES:
        raise RecipeError(
            f"the recipe has {len(content):,} bytes, {len(packed):,} when packed, and a job can carry at most "
            f"{MOST_RECIPE_BYTES:,}, {MOST_RECIPE_CHARACTERS:,} when packed. Remove comments, or use a shorter recipe "
            f"and override its values with ARGS="
        )
    return packed


def unpack_recipe(packed: str) -> bytes:
    """Unpack a recipe, in UTF-8, with at most MOST_RECIPE_BYTES in memory. Raises `RecipeError` for a text that
    `pack_recipe` did not make.
    """
    try:
        if len(packed) > MOST_RECIPE_CHARACTERS:
            raise ValueError(f"{len(packed):,} characters, expected at most {MOST_RECIPE_CHARACTERS:,}")
        unfolding = zlib.decompressobj()
        content = unfolding.decompress(base64.b64decode(packed, validate=True), MOST_RECIPE_BYTES)
        if not unfolding.eof or unfolding.unused_data:
            raise ValueError(f"it is cut off, has extra data, or has more than {MOST_RECIPE_BYTES:,} bytes")
        content.decode()
    except (binascii.Error, ValueError, zlib.error) as error:
        raise RecipeError(f"{RECIPE_VARIABLE} is not a packed recipe ({error}). Submit the job again.") from error
    return content
