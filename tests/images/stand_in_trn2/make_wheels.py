"""Makes an empty wheel for each pin of a file: `make_wheels.py PINS FOLDER`.

torch has a version and the one class that other packages read when they are imported. Neuron's packages have a local
version, as real ones do, and torch-neuronx needs one package that the lock has and one that it lacks.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

NEEDS = {"torch-neuronx": ("torch==2.13.*", "numpy>=1", "toolz")}
MODULES = {"neuronx-cc": "neuronxcc"}
TORCH = "class Tensor: ...\n"


def main(pins: Path, folder: Path) -> None:
    folder.mkdir()
    for name, version in re.findall(r"^([a-z-]+)==(.+)$", pins.read_text(encoding="utf-8"), flags=re.MULTILINE):
        module, full = MODULES.get(name, name.replace("-", "_")), version if name == "torch" else f"{version}+f00dcafe"
        about = f"{name.replace('-', '_')}-{full}"
        needed = "".join(f"Requires-Dist: {each}\n" for each in NEEDS.get(name, ()))
        source = f'__version__ = "{full}"\n{TORCH if name == "torch" else ""}'
        with zipfile.ZipFile(folder / f"{about}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/__init__.py", source)
            wheel.writestr(
                f"{about}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {full}\n{needed}"
            )
            wheel.writestr(f"{about}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}.dist-info/RECORD", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
