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

from services.common.errors import ArtifactError

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
    """Find the graphs of a cache, largest first. Raises `ArtifactError` for a folder without a graph or its flags."""
    folders = cache.glob(f"{COMPILER_PREFIX}*/MODULE_*")
    return sorted((_read(cache, folder) for folder in folders), key=lambda module: (-module.graph_bytes, module.name))


def _read(cache: Path, folder: Path) -> Module:
    compiler = folder.parent.name.removeprefix(COMPILER_PREFIX)
    try:
        flags, graph_bytes = json.loads((folder / FLAGS).read_bytes()), (folder / GRAPH).stat().st_size
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{folder}: expected {GRAPH} and {FLAGS}, as a trace leaves them ({error}). Trace again."
        ) from error
    return Module(cache, compiler, folder.name, tuple(flags), graph_bytes)
