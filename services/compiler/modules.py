"""Reads libneuronxla's cache, the layout in which a trace leaves graphs and a trainer finds compiled ones.

CACHE/neuronxcc-<version of the compiler>/MODULE_<hash of the graph>+<hash of the flags>/
    model.hlo_module.pb    the graph
    compile_flags.json     a list of the flags of neuronx-cc
    model.neff             the compiled graph
    model.done             empty; without it the NEFF does not count
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

GRAPH = "model.hlo_module.pb"
FLAGS = "compile_flags.json"
NEFF = "model.neff"
DONE = "model.done"

COMPILER_PREFIX = "neuronxcc-"


@dataclass(frozen=True)
class Module:
    """One graph with the flags of its compilation."""

    cache: Path
    compiler: str
    """Version of neuronx-cc that the graph is for."""
    name: str
    flags: tuple[str, ...]
    graph_bytes: int

    @property
    def path(self) -> str:
        """Path of the graph's folder, relative to a cache."""
        return f"{COMPILER_PREFIX}{self.compiler}/{self.name}"

    @property
    def folder(self) -> Path:
        return self.cache / self.path

    @property
    def is_compiled(self) -> bool:
        return (self.folder / NEFF).is_file() and (self.folder / DONE).is_file()


def find_modules(cache: Path) -> list[Module]:
    """Find the graphs of a cache, largest first."""
    modules = [
        Module(
            cache,
            compiler=folder.parent.name.removeprefix(COMPILER_PREFIX),
            name=folder.name,
            flags=tuple(json.loads((folder / FLAGS).read_bytes())),
            graph_bytes=(folder / GRAPH).stat().st_size,
        )
        for folder in cache.glob(f"{COMPILER_PREFIX}*/MODULE_*")
    ]
    return sorted(modules, key=lambda module: (-module.graph_bytes, module.name))
