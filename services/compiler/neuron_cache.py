"""Builds the compile cache of a Neuron program: trace, compile, publish, verify.

A trace leaves one folder per graph. neuronx-cc needs no Neuron device, so every graph is a task for any node.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import GRAPHS, CompileCachePayload
from services.common.artifacts.files import list_files, xxh3_of
from services.common.artifacts.manifest import PhaseTimer, write_durably
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import DeviceError
from services.common.launch.launcher import Launcher
from services.common.recipe.schema import Recipe, fingerprint
from services.compiler.fan_out import compile_modules, make_tasks
from services.compiler.modules import DONE, FLAGS, GRAPH, NEFF, Module, find_modules
from services.compiler.neuronx_cc import CompiledModule, CompileTask, compiler_version

DEVICE: str = "xla"
"""Value of `parallel.device` whose graphs neuronx-cc compiles."""
COMPILED = "neuronx-cc"
"""Subfolder of the shared scratch for compiled graphs; the next command continues from it."""
MODULES_FILE = "modules.json"
"""File of the artifact with one `CompiledModule` per graph."""


def build_neuron_cache(
    recipe: Recipe, facts: dict[str, Any], workspace: Workspace, launcher: Launcher, trace: Callable[..., object]
) -> Draft:
    """Fill `workspace.files` with every graph of the recipe's program, proven complete by a second trace.

    `trace(folder, title, warm_from=None)` runs every phase of the program with the cache `folder/cache`, at first a
    copy of `warm_from`, or empty, and adds a module to it for every graph that is not compiled there.

    Raises `DeviceError` where neuronx-cc is missing, and one that names all failed graphs with the ends of their logs;
    `StorageError` when a disk is full.
    """
    compiler_version()  # a missing neuronx-cc is an error before the trace, not after it
    scratch, phase_timer = workspace.own_scratch, PhaseTimer()
    with phase_timer.phase("trace"):
        trace(scratch / "trace", "tracing")
        modules = traced_modules(scratch / "trace" / "cache")
    with phase_timer.phase("compile"):
        compiled = workspace.scratch / COMPILED
        for path in [*compiled.rglob(".*.tmp")]:  # of tasks that were killed
            path.unlink(missing_ok=True)
        tasks = make_tasks(modules, compiled, recipe.compile)
        records = compile_modules(tasks, launcher, recipe.compile)
    with phase_timer.phase("publish"):
        published = workspace.files / GRAPHS
        for task, record in zip(tasks, records, strict=True):
            _publish(task, record, published / task.module.path)
        listed = [record.model_dump(mode="json") for record in records]
        write_durably(workspace.files / MODULES_FILE, json.dumps(listed, indent=1).encode())
    with phase_timer.phase("verify"):
        # A copy at another path, as on a trainer's node.
        trace(scratch / "verify", "verifying", warm_from=published)
        _require_complete(published, scratch / "verify" / "cache")
    return make_draft(recipe, facts, len(records), phase_timer)


def make_draft(recipe: Recipe, facts: dict[str, Any], num_graphs: int, phase_timer: PhaseTimer) -> Draft:
    """Describe a cache to which a second trace added no graph."""
    payload = CompileCachePayload(
        target=recipe.parallel.device,
        program_fingerprint=fingerprint(facts),
        facts=facts,
        graphs_compiled=num_graphs,
        graphs_missed_by_verification=0,
        world_size_traced=recipe.parallel.num_workers,
        phases=tuple(phase_timer.phases),
    )
    return Draft(payload)


def traced_modules(cache: Path) -> list[Module]:
    """Find the graphs that a trace left in an empty cache, largest first. Raises `DeviceError` when there are none."""
    modules = find_modules(cache)
    if not modules:
        raise DeviceError(f"{cache}: the trace left no graph. Its log is {cache.parent}/log.txt.")
    return modules


def _publish(task: CompileTask, record: CompiledModule, target: Path) -> None:
    """Copy the four files of a graph to `target`; other files of its folder, such as logs, stay behind."""
    target.mkdir(parents=True)
    for source in (task.module.folder / GRAPH, task.module.folder / FLAGS, task.folder / NEFF):
        shutil.copyfile(source, target / source.name)
    if xxh3_of(target / NEFF) != record.neff_xxh3_128:
        raise DeviceError(f"{task.folder / NEFF}: changed after it was compiled. Run the same command again.")
    (target / DONE).touch()


def _require_complete(published: Path, verified: Path) -> None:
    """Raise `DeviceError` if the trace with a copy of the published cache added or changed a graph."""
    before, after = ({path: xxh3_of(cache / path) for path in list_files(cache)} for cache in (published, verified))
    missed = [module for module in find_modules(verified) if not module.is_compiled]
    changed = [path for path, digest in before.items() if after.get(path) != digest]
    if missed or changed:
        named = ", ".join([*(f"{module.name} ({module.graph_bytes:,} bytes)" for module in missed), *changed][:4])
        raise DeviceError(
            f"the compile cache is not reusable: a second trace with a copy of it added {len(missed)} graphs and "
            f"changed {len(changed)} files: {named}. Nothing was published. Two traces of one program must give the "
            f"same graphs; compare {published} and {verified}."
        )
