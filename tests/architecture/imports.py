"""Reads imports and calls from the source with `ast`, without importing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# Modules that another imports by name at run time, because not every image has their libraries.
CHOSEN_AT_RUN_TIME = {
    "services.common.launch.launcher": {"services.common.launch.inline", "services.common.launch.ray_launcher"},
    "services.common.program.backends.choice": {"services.common.program.backends.torch_native"},
}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(root: Path, *folders: str) -> dict[str, Path]:
    """Return the paths of all modules below the folders (default: services) by name, without tests."""
    paths = sorted(path for folder in folders or ("services",) for path in (root / folder).rglob("*.py"))
    return {module_name(path, root): path for path in paths if "tests" not in path.relative_to(root).parts}


def imports_of(path: Path, *, with_optional: bool = True) -> set[str]:
    """Return the full names that a file imports, also inside of functions: `from a import b` counts as `a.b`.

    An optional import is one inside of `try ... except ImportError`.
    """
    return set(_imports_in(path.read_text(encoding="utf-8"), with_optional))


@cache
def _imports_in(source: str, with_optional: bool) -> frozenset[str]:
    found = set[str]()
    for node in _nodes_that_run(ast.parse(source), with_optional):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def closure_of(modules: dict[str, Path], start: set[str], *, with_optional: bool = True) -> set[str]:
    """Return `start` and all first-party modules that it imports, directly or through others."""
    seen: set[str] = set()
    waiting = set(start)
    while waiting:
        module = waiting.pop()
        seen.add(module)
        names = imports_of(modules[module], with_optional=with_optional)
        imported = {name for full in names for name in (full, full.rpartition(".")[0]) if name in modules}
        waiting |= (imported | CHOSEN_AT_RUN_TIME.get(module, set()) & modules.keys()) - seen
    return seen


def third_parties_of(path: Path, *, with_optional: bool = True) -> set[str]:
    """Return the top-level names that a file imports from neither this repository nor the standard library."""
    names = {full.split(".")[0] for full in imports_of(path, with_optional=with_optional)}
    return names - {"services"} - set(sys.stdlib_module_names)


def _nodes_that_run(tree: ast.AST, with_optional: bool) -> Iterator[ast.AST]:
    """Yield all nodes except those under `if TYPE_CHECKING:`, and optional imports unless `with_optional`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Try) and not with_optional and any(map(_does_without, child.handlers)):
            continue
        yield from _nodes_that_run(child, with_optional)


def _does_without(handler: ast.ExceptHandler) -> bool:
    return handler.type is not None and "ImportError" in ast.unparse(handler.type)
