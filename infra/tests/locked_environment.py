"""A program as it is in the environment of a lock: what the lock does not pin cannot be imported.

`python -m infra.tests.locked_environment LOCK MODULE...` imports the modules, and lets `infra.__main__` say what the
stack costs.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path

from images.lock import pins_of


class Unlocked:
    """Finds nothing, and refuses what is of a distribution that the lock does not pin."""

    def __init__(self, lock: Path) -> None:
        pinned = {_normalized(name) for name in pins_of(lock)}
        self._absent = {
            package
            for package, distributions in packages_distributions().items()
            if pinned.isdisjoint(map(_normalized, distributions))
        }

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._absent:
            raise ModuleNotFoundError(f"No module named {name!r}: the lock does not pin it", name=name)
        return None


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.meta_path.insert(0, Unlocked(Path(sys.argv[1])))
    for module in map(importlib.import_module, sys.argv[2:]):
        if module.__name__ == "infra.__main__":
            module.main(["cost"])
