"""A digest of the program's source, which comments, docstrings and formatting do not change."""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "services.common.program"


def source_digest(*modules: str) -> str:
    """Return the SHA-256 of the syntax trees of these modules and of all modules of the program that they import.

    Raises `FileNotFoundError` where the program is installed without its source, and has no digest.
    """
    digest = hashlib.sha256()
    for module, parsed in sorted(_closure_of(modules).items()):
        digest.update(f"{module}\n{parsed.tree}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Module:
    imports: tuple[str, ...]
    """Full names of all modules that the module imports, and of all names that it imports from them."""
    tree: str
    """The syntax tree without docstrings."""


def _closure_of(modules: tuple[str, ...]) -> dict[str, _Module]:
    found: dict[str, _Module] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = _path_of(module)
        if module in found or (module not in modules and not path.is_file()):  # a name in a module
            continue
        found[module] = _parse(path.read_text(encoding="utf-8"))
        waiting += [name for name in found[module].imports if name.startswith(f"{PACKAGE}.")]
    return found


@functools.lru_cache(maxsize=128)  # a command and its tests ask several times, and parsing all modules takes 0.1 s
def _parse(text: str) -> _Module:
    tree = ast.parse(text)
    return _Module(tuple(_imports_of(tree)), ast.dump(_without_docstrings(tree)))


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
