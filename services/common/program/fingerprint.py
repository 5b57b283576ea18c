"""The facts that compiled graphs depend on. A program uses a compile cache only where all facts are equal.

No library's own cache key is complete. So these facts select the cache's directory, and are stored with it, so that an
error can name those that differ.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from services.common.program.backends.choice import choose_backend
from services.common.recipe.schema import Recipe, identity

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
        "source": source_digest(f"{PACKAGE}.step", backend.__module__),
        "content_version": CONTENT_VERSION,
    }


def source_digest(*modules: str) -> str:
    """Return the SHA-256 of the syntax trees of these modules and of all modules of the program that they import.
    Comments, docstrings and formatting do not change it.

    Raises `FileNotFoundError` where the program is installed without its source, and has no digest.
    """
    trees: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = Path(__file__).parent.joinpath(*module.removeprefix(f"{PACKAGE}.").split(".")).with_suffix(".py")
        if module in trees or (module not in modules and not path.is_file()):  # a name in a module
            continue
        imported, trees[module] = _parse(path.read_text(encoding="utf-8"))
        waiting += [name for name in imported if name.startswith(f"{PACKAGE}.")]
    listed = "".join(f"{module}\n{tree}\n" for module, tree in sorted(trees.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


@functools.lru_cache(maxsize=128)  # a command asks several times, and parsing all modules takes 0.1 s
def _parse(text: str) -> tuple[list[str], str]:
    """Return the full names of all imports, also of those inside of functions, where `from a import b` is `a` and
    `a.b`, and the syntax tree without the statements that are a text alone.
    """
    tree, imported = ast.parse(text), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return imported, ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
