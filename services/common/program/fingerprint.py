"""What a compiled graph depends on. A cache is used only by a program with equal facts.

No library's own key is complete, so the directory is chosen by these facts, and they are stored beside it to say what
differs.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from services.common.program.backends.choice import choose_backend
from services.common.program.source import source_digest
from services.common.recipe import Recipe, identity

CONTENT_VERSION = 1
"""Raised when the compiler stage would store other bytes for the same program."""


def program_facts(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides the graphs and the bits of this recipe's step on this machine, by name.

    Raises `DeviceError` when there is no backend for the device, or the recipe compiles and a compiler is missing.
    """
    backend = choose_backend(recipe.parallel.device)
    return {
        "recipe": identity(recipe, "compile_cache"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **backend.facts(recipe),
        "source": source_digest("services.common.program.step", backend.__module__),
        "content_version": CONTENT_VERSION,
    }


def explain_difference(
    theirs: dict[str, Any], ours: dict[str, Any], sides: tuple[str, str] = ("cache", "this run")
) -> str:
    """The facts in which two programs differ, both sides, one per line."""
    lines = []
    for name in sorted({*theirs, *ours}):
        left, right = theirs.get(name), ours.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += [f"{name}.{line}" for line in explain_difference(left, right, sides).splitlines()]
        elif left != right:
            if isinstance(left, list) and isinstance(right, list):  # of dozens of CPU features: those that one lacks
                left, right = [each for each in left if each not in right], [each for each in right if each not in left]
            lines.append(f"{name}: {sides[0]} {_short(left)}, {sides[1]} {_short(right)}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
