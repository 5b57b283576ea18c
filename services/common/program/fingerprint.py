"""The facts that compiled graphs depend on. A program uses a compile cache only where all facts are equal.

No library's own cache key is complete. So these facts select the cache's directory, and are stored with it, so that an
error can name those that differ.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from services.common.program.backends.choice import choose_backend
from services.common.recipe.schema import Recipe, identity
from services.common.source_code import digest_source

CONTENT_VERSION = 1
"""Number to raise when the compiler stage stores other bytes for the same program."""
PACKAGE = "services.common.program"


def program_facts(recipe: Recipe) -> dict[str, Any]:
    """Return by name all facts that decide the graphs and the bits of this recipe's step on this machine.

    Raises `DeviceError` where there is no backend for the device, or the recipe compiles and a compiler is missing.
    """
    backend = choose_backend(recipe.parallel.device)
    return {
        "recipe": identity(recipe, "compile_cache"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **backend.facts(recipe),
        "source": digest_source(f"{PACKAGE}.step", backend.__module__, packages=(f"{PACKAGE}.",)),
        "content_version": CONTENT_VERSION,
    }


def explain_difference(
    theirs: dict[str, Any], ours: dict[str, Any], sides: tuple[str, str] = ("cache", "this run")
) -> str:
    """Return the facts in which two programs differ, one a line with both sides."""
    lines = []
    for name in sorted({*theirs, *ours}):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += [f"{name}.{line}" for line in explain_difference(left, right, sides).splitlines()]
        elif left != right:
            if isinstance(left, list) and isinstance(right, list):  # show only the CPU features that one side lacks
                left, right = [each for each in left if each not in right], [each for each in right if each not in left]
            lines.append(f"{name}: {sides[0]} {_short(left)}, {sides[1]} {_short(right)}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
