"""The graphs of a Neuron program on disk: libneuronxla's cache, which a trace leaves and a trainer reads.

CACHE/neuronxcc-<version of the compiler>/MODULE_<hash of the graph>+<hash of the flags>/
    model.hlo_module.pb    the graph
    compile_flags.json     a list of the flags of neuronx-cc
    model.neff             what was compiled, and then
    model.done             which makes it count
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ArtifactError
from services.common.input.files import parse_json, read_file

GRAPH = "model.hlo_module.pb"
FLAGS = "compile_flags.json"
NEFF = "model.neff"
DONE = "model.done"

COMPILER_PREFIX = "neuronxcc-"
_NAME = re.compile(r"MODULE_[\w+.-]+")


@dataclass(frozen=True)
class Module:
    """One graph, and the flags that it is compiled with."""

    cache: Path
    compiler: str
    """Version of neuronx-cc."""
    name: str
    flags: tuple[str, ...]
    graph_bytes: int

    @property
    def path(self) -> str:
        """Of its folder, below a cache."""
        return f"{COMPILER_PREFIX}{self.compiler}/{self.name}"

    @property
    def folder(self) -> Path:
        return self.cache / self.path

    @property
    def is_compiled(self) -> bool:
        return (self.folder / NEFF).is_file() and (self.folder / DONE).is_file()


def find_modules(cache: Path) -> list[Module]:
    """The graphs of a cache, largest first. Raises `ArtifactError` for one without a graph or its flags."""
    folders = [path for path in cache.glob(f"{COMPILER_PREFIX}*/*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted((_read(cache, folder) for folder in folders), key=lambda module: (-module.graph_bytes, module.name))


def _read(cache: Path, folder: Path) -> Module:
    try:
        graph_bytes = (folder / GRAPH).stat().st_size
        flags = parse_json(read_file(folder / FLAGS))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{folder}: no graph with its flags as a trace leaves it ({error}): {GRAPH} and {FLAGS}. Trace again."
        ) from error
    if graph_bytes == 0 or not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        what = (
            f"{GRAPH} is empty" if graph_bytes == 0 else f"{FLAGS} holds {json.dumps(flags)[:80]}, not a list of flags"
        )
        raise ArtifactError(f"{folder}: {what}. Trace again.")
    compiler = folder.parent.name.removeprefix(COMPILER_PREFIX)
    return Module(cache, compiler, folder.name, tuple(flags), graph_bytes)
