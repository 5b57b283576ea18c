"""What a folder or a glob stands for, by the rules of the library `datasets`.

A name that starts with a dot, and a folder that starts with `__`, are read where the pattern spells that out. So is a
file that describes a data set or marks its end.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence

import fsspec.utils

from services.common.errors import RecipeError

IGNORED_BY_DATASETS = frozenset(
    {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "dummy_data.zip"}
)
# Spark, Hadoop, Databricks and Dask write these beside their parts. They hold no row, or cannot be read as one.
_MADE_BY_WRITERS = re.compile(r"_(SUCCESS|(committed|started)_\d+|(common_)?metadata)")
_HIDDEN_NAME = re.compile(r"/\.+[^./]")
_SPECIAL_FOLDER = re.compile(r"/__(?=[^/]*/)")


class PathPattern:
    """The files that a pattern below a folder matches. `**` is any number of folders, and at the end every file."""

    def __init__(self, base: str, parts: Sequence[str]) -> None:
        """Take a folder, and the names or patterns of the path below it. Raises `RecipeError` for `a**`."""
        self.base = base
        self.parts = list(parts)
        whole = "/".join([glob.escape(base), *parts])
        try:
            self._match = re.compile(fsspec.utils.glob_translate(whole)).match
            self._match_names = [re.compile(fsspec.utils.glob_translate(part)).match for part in parts]
        except ValueError as error:
            raise RecipeError(f"{base}/{'/'.join(parts)}: `**` is a whole name, as in `**/*.jsonl`.") from error
        self._named = _count_hidden(whole)

    def matches(self, path: str) -> bool:
        return self._match(path) is not None and self.shows(path)

    def shows(self, path: str) -> bool:
        """Return whether the pattern spells out every hidden name of a path that it matches."""
        return _count_hidden(path) == self._named

    def leads_into(self, folder: str, depth: int) -> bool:
        """Return whether files below a folder may match. The folder's path has `depth` names below the base."""
        hidden, special = _count_hidden(f"{folder}/")
        if hidden > self._named[0] or special > self._named[1]:
            return False
        if self.is_endless(depth):
            return True
        name = folder.rpartition("/")[2]
        return depth < len(self.parts) and self._match_names[depth - 1](name) is not None

    def is_endless(self, depth: int) -> bool:
        """Return whether the pattern's first `depth` names match a path of any length."""
        return "**" in self.parts[:depth]


def holds_no_documents(name: str) -> bool:
    """Return whether a file of this name describes other files, as a rule."""
    return name in IGNORED_BY_DATASETS or _MADE_BY_WRITERS.fullmatch(name) is not None


def _count_hidden(path: str) -> tuple[int, int]:
    """Return the numbers of names that start with a dot, and of folders that start with `__`."""
    path = f"/{path}"
    return len(_HIDDEN_NAME.findall(path)), len(_SPECIAL_FOLDER.findall(path))
