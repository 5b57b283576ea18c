"""Millrace in Python: a recipe, a corpus as a torch dataset, and a checkpoint as a model of transformers.

`docs/python-api.md` has an example of each. Nothing heavy is imported before one of them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.checkpoint import load_checkpoint
    from millrace.corpus import CorpusDataset, open_corpus
    from millrace.recipe import load_recipe

__all__ = ["CorpusDataset", "load_checkpoint", "load_recipe", "open_corpus"]

_MODULES = {
    "CorpusDataset": "millrace.corpus",
    "load_checkpoint": "millrace.checkpoint",
    "load_recipe": "millrace.recipe",
    "open_corpus": "millrace.corpus",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
