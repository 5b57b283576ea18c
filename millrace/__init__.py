"""Millrace in Python: a recipe, a corpus as a torch dataset, and a checkpoint as a model of transformers.

`docs/python-api.md` has an example of each. Nothing heavy is imported before one of them is used.

An installation has this package alone, and the others of the repository in it. Modules of this package, and what they
import, find `services` as `millrace.services`, so that a folder of that name beside a notebook is the notebook's.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.checkpoint import load_checkpoint
    from millrace.corpus import CorpusDataset, open_corpus
    from millrace.recipe import load_recipe
    from services.common.errors import ArtifactError, MillraceError, RecipeError

__all__ = [
    "ArtifactError",
    "CorpusDataset",
    "MillraceError",
    "RecipeError",
    "load_checkpoint",
    "load_recipe",
    "open_corpus",
]

_PLACES = (Path(__file__).parent / "tree", Path(__file__).parents[1])
TREE = next(each for each in _PLACES if (each / "services").is_dir())
"""Folder of the other packages and of the recipes: in a wheel one of its own, else the repository."""
_MODULES = {
    **dict.fromkeys(("ArtifactError", "MillraceError", "RecipeError"), "millrace.services.common.errors"),
    **dict.fromkeys(("CorpusDataset", "open_corpus"), "millrace.corpus"),
    "load_checkpoint": "millrace.checkpoint",
    "load_recipe": "millrace.recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from millrace.programs import advise_install  # noqa: PLC0415

        raise ModuleNotFoundError(f"millrace.{name}: {error}: {advise_install('trainer')}", name=error.name) from error


def __dir__() -> list[str]:
    return __all__


def _import(name: str, *where: Any) -> ModuleType:
    return builtins.__import__(f"millrace.{name}" if name.startswith("services.") else name, *where)


class _OwnLoader(SourceFileLoader):
    """Finds and loads a module of this package, whose import statements call `_import`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("millrace.") else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _OwnLoader(name, spec.loader.path)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


__path__.append(str(TREE))
sys.meta_path.insert(0, _OwnLoader)
