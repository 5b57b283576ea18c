"""Installs the stand-in as the package `torch_neuronx`, which the program imports and whose version it asks for."""

from __future__ import annotations

from pathlib import Path

VERSION = "2.13.3.0+stand.in"
_MODULE = """import os
from pathlib import Path

from services.common.testing.torch_neuron import attention, collectives, device

if device.install():
    attention.register(device.library())
    collectives.register()
    # A compiler of its own is installed on PATH.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(__file__).parents[1] / "bin")])
"""
# Torch imports the compiler when it is first asked for, which takes seconds that eager runs save.
_ENTRY_POINTS = "[torch_dynamo_backends]\nneuron = services.common.testing.torch_neuron.graphs:NEURON\n"
_COMPILER = """#!/bin/sh
[ "$1" = compile ] && exec cp "$2" "$8"
echo "expected: compile GRAPH --framework XLA --target FAMILY --output NEFF" >&2
exit 2
"""


def write_package(folder: Path) -> Path:
    """Write the package and a compiler below `folder`, which processes find with PYTHONPATH, and return the folder."""
    (folder / "torch_neuronx").mkdir(parents=True)
    (folder / "torch_neuronx" / "__init__.py").write_text(_MODULE, encoding="utf-8")
    described = folder / "torch_neuronx-2.13.3.dist-info"
    described.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {VERSION}\n"
    (described / "METADATA").write_text(metadata, encoding="utf-8")
    (described / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    compiler = folder / "bin" / "neuronx-cc"
    compiler.parent.mkdir()
    compiler.write_text(_COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    return folder
