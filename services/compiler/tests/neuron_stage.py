"""Runs the compiler stage for Neuron over hand-written graphs, as a program or as a function.

`python -m services.compiler.tests.neuron_stage RECIPE ROOT GRAPHS LAUNCH`
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.store import Artifact, publish_once
from services.common.launch.launcher import choose_launcher
from services.common.process.entry_point import run_program
from services.common.process.telemetry import configure_logging
from services.common.recipe.file import load_recipe
from services.common.recipe.schema import Recipe, fingerprint
from services.compiler.modules import COMPILER_PREFIX, FLAGS, GRAPH, find_modules
from services.compiler.neuron_cache import build_neuron_cache
from services.compiler.tests.neuronx_cc import VERSION

FLAGS_OF_TRACE = ["--target=trn1", "--model-type=transformer"]


def write_graph(cache: Path, name: str, size: int, flags: list[str] | None = None, version: str = VERSION) -> str:
    """Write a module of `size` bytes as a trace does; returns its name, whose end is a hash of the flags."""
    flags = FLAGS_OF_TRACE if flags is None else flags
    module = f"MODULE_{name}+{hashlib.md5(json.dumps(flags).encode()).hexdigest()[:8]}"
    folder = cache / f"{COMPILER_PREFIX}{version}" / module
    folder.mkdir(parents=True)
    (folder / GRAPH).write_bytes((name.encode() * size)[:size])
    (folder / FLAGS).write_text(json.dumps(flags), encoding="utf-8")
    return module


class HandWrittenTrace:
    """Trace that copies hand-written graphs to the cache, except those that the cache holds compiled."""

    def __init__(self, graphs: Path) -> None:
        self.graphs = graphs

    def __call__(self, folder: Path, title: str, warm_from: Path | None = None) -> None:
        cache = folder / "cache"
        if warm_from:
            shutil.copytree(warm_from, cache)
        cache.mkdir(parents=True, exist_ok=True)
        compiled = {module.path for module in find_modules(cache) if module.is_compiled}
        for module in find_modules(self.graphs):
            if module.path not in compiled:
                shutil.copytree(module.folder, cache / module.path, dirs_exist_ok=True)


def publish_neuron_cache(
    recipe: Recipe, root: Path, graphs: Path, launch: str
) -> tuple[Artifact[CompileCacheManifest], bool]:
    facts = {"graphs": sorted(module.path for module in find_modules(graphs))}
    address = compile_cache_address(root, recipe, fingerprint(facts))
    launcher, trace = choose_launcher(launch), HandWrittenTrace(graphs)
    return publish_once(
        address,
        CompileCacheManifest,
        "compiler",
        recipe,
        lambda workspace: build_neuron_cache(recipe, facts, workspace, launcher, trace),
    )


def main(argv: list[str]) -> int:
    configure_logging("compiler")
    recipe, root, graphs, launch = argv
    cache, is_new = publish_neuron_cache(load_recipe(Path(recipe)), Path(root), Path(graphs), launch)
    print(f"{'published' if is_new else 'already published'}: {cache.path}")
    return 0


if __name__ == "__main__":
    run_program(main)
