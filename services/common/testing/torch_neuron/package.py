"""Installs the stand-in as the package `torch_neuronx`, which the program imports and whose version it asks for."""

from __future__ import annotations

from pathlib import Path

VERSION = "2.13.3.0+stand.in"
_MODULE = """from services.common.testing.torch_neuron import collectives, device, graphs

if device.install():
    collectives.register()
    graphs.register()
"""


def write_package(folder: Path) -> Path:
    """Write the package below `folder`, which processes find with PYTHONPATH, and return the folder."""
    (folder / "torch_neuronx").mkdir(parents=True)
    (folder / "torch_neuronx" / "__init__.py").write_text(_MODULE, encoding="utf-8")
    described = folder / "torch_neuronx-2.13.3.dist-info"
    described.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {VERSION}\n"
    (described / "METADATA").write_text(metadata, encoding="utf-8")
    return folder
