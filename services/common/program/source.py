"""A digest of the program's source, which comments, docstrings and formatting do not change."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

PACKAGE = "services.common.program"


def source_digest(*modules: str) -> str:
    """Return the SHA-256 of the syntax trees of these modules and of all modules of the program that they import.

    Raises `FileNotFoundError` where the program is installed without its source, and has no digest.
    """
    digest = hashlib.sha256()
    for module, tree in sorted(_closure_of(modules).items()):
        digest.update(f"{module}\n{ast.dump(_without_docstrings(tree))}\n".encode())
    return digest.hexdigest()


def _closure_of(modules: tuple[str, ...]) -> dict[str, ast.Module]:
    trees: dict[str, ast.Module] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _path_of(module)
        if module in trees or (module not in modules and not path.is_file()):  # a name in a module
            continue
        trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        waiting += [name for name in _imports_of(trees[module]) if name.startswith(f"{PACKAGE}.")]
    return trees


def _path_of(module: str) -> Path:
    return Path(__file__).parent.joinpath(*module.removeprefix(f"{PACKAGE}.").split(".")).with_suffix(".py")


def _imports_of(tree: ast.Module) -> list[str]:
    """Return the full names of all imports, also of those inside of functions: `from a import b` is `a` and `a.b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove all statements that are a text alone from the tree, and return it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
