"""Hashes the source of a part of this program: the syntax trees of its modules, and of those that they import."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def digest_source(*modules: str, packages: tuple[str, ...], with_imports: bool = True) -> str:
    """Return the SHA-256 of these modules and of all that they import whose names begin with one of `packages`.

    Comments, docstrings and formatting do not change it, nor do imports and names of modules unless `with_imports`.
    Raises `FileNotFoundError` where the program is installed without its source, and has no digest.
    """
    trees: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if module in trees or (module not in modules and not path.is_file()):  # a name in a module
            continue
        imported, trees[module] = _parse(path.read_text(encoding="utf-8"), with_imports)
        waiting += [name for name in imported if name.startswith(packages)]
    listed = sorted(f"{module if with_imports else ''}\n{tree}\n" for module, tree in trees.items())
    return hashlib.sha256("".join(listed).encode()).hexdigest()


@functools.lru_cache(maxsize=128)  # a command asks several times, and parsing all modules takes 0.1 s
def _parse(text: str, with_imports: bool) -> tuple[list[str], str]:
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
            node.body = [each for each in body if _is_statement(each, with_imports)]  # type: ignore[attr-defined]
    return imported, ast.dump(tree)


def _is_statement(node: ast.AST, with_imports: bool) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return not is_text and (with_imports or not isinstance(node, ast.Import | ast.ImportFrom))
