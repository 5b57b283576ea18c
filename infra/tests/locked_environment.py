"""A program as it is in the environment of a lock: what the lock does not pin cannot be imported.

`python -m infra.tests.locked_environment LOCK MODULE...` imports the modules, and lets `infra.__main__` say what the
stack costs.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from images.lock import pins_of


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    pinned = set(map(_normalized, pins_of(Path(sys.argv[1]))))
    for package, distributions in packages_distributions().items():
        if pinned.isdisjoint(map(_normalized, distributions)) and "millrace" not in distributions:
            sys.modules[package] = None  # type: ignore[assignment]  # Python refuses to import it
    for module in map(importlib.import_module, sys.argv[2:]):
        if module.__name__ == "infra.__main__":
            module.main(["cost"])
