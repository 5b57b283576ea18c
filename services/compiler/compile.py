"""Builds the compile cache with processes: one traces with an empty cache, others go on with it where other ranks may
have other graphs, and the last one verifies with a copy of the result.

For Neuron this is `neuron_cache`; both run the trace in a child process here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.common.artifacts.compile_cache import GRAPHS
from services.common.artifacts.files import list_files
from services.common.artifacts.manifest import PhaseTimer
from services.common.artifacts.store import Draft, Workspace
from services.common.errors import DeviceError, StorageError, WorkersLost
from services.common.launch.launcher import choose_launcher
from services.common.process.progress import show_progress
from services.common.program.backends.choice import choose_backend
from services.common.recipe.schema import Recipe
from services.compiler import neuron_cache
from services.compiler.child_process_group import running_in_group, shell_exit_code
from services.compiler.trace import PHASES

NEARLY_FULL_BYTES = 2**20

# Messages of g++ about its own processes, and of Python about g++.
_KILLED = re.compile(r"(Killed|Terminated|Hangup) signal terminated program \w+|died with <Signals\.SIG(KILL|TERM|HUP)")


@dataclass(frozen=True)
class TraceReport:
    graphs_compiled: int
    new_files: tuple[str, ...]
    """Files that the trace added to its cache, relative to it."""


def compile_graphs(recipe: Recipe, facts: dict[str, Any], workspace: Workspace, launch: str) -> Draft:
    """Fill `workspace.files` with every graph of the recipe's program, proven complete by a second process.

    The launcher `launch` starts the tasks of neuronx-cc; other compilers have none.

    Raises `DeviceError` with the compiler's log when a graph fails, `StorageError` when the disk is full.
    """
    if recipe.parallel.device == neuron_cache.DEVICE:
        trace = partial(trace_in_child, recipe)
        return neuron_cache.build_neuron_cache(recipe, facts, workspace, choose_launcher(launch), trace)
    scratch, phase_timer = workspace.own_scratch, PhaseTimer()
    ranks = choose_backend(recipe.parallel.device).ranks_to_trace(recipe)
    with phase_timer.phase("compile"):
        num_compiled = _compile_ranks(recipe, scratch / "compile", ranks)
        published = workspace.files / GRAPHS
        _copy_files(scratch / "compile" / "cache", published)
    with phase_timer.phase("verify"):
        # At another path, as on a trainer's node: a cache that works only where it was made would pass otherwise.
        verified = trace_in_child(recipe, scratch / "verify", "verifying", published, rank=ranks[-1])
    if verified.graphs_compiled or verified.new_files:
        raise DeviceError(
            f"the compile cache is not reusable: with a copy of it, a second process compiled "
            f"{verified.graphs_compiled} graphs and wrote {len(verified.new_files)} files "
            f"({', '.join(verified.new_files[:3])} ...). Nothing was published. "
            f"Compare {scratch}/compile/log.txt and {scratch}/verify/log.txt."
        )
    return neuron_cache.make_draft(recipe, facts, num_compiled, phase_timer)


def _compile_ranks(recipe: Recipe, folder: Path, ranks: Sequence[int]) -> int:
    """Fill `folder/cache` with the graphs of these ranks, and return their number.

    Where the second rank adds none to those of the first, no graph lists ranks, and all others have the same.
    """
    total = 0
    for number, rank in enumerate(ranks, start=1):
        title = f"compiling for rank {rank}, {number} of {len(ranks)}" if len(ranks) > 1 else "compiling"
        report = trace_in_child(recipe, folder, title, rank=rank)
        total += report.graphs_compiled
        if number == 2 and not report.new_files:
            break
    return total


def trace_in_child(
    recipe: Recipe,
    folder: Path,
    title: str,
    warm_from: Path | None = None,
    rank: int = 0,
) -> TraceReport:
    """Run `services.compiler.trace` in a child process with the cache directory `folder/cache`, which may have graphs
    of other ranks.
    """
    cache = folder / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if warm_from:
        _copy_files(warm_from, cache)
    before = set(list_files(cache))
    (folder / "recipe.json").write_text(recipe.model_dump_json(), encoding="utf-8")
    with (
        _child(folder, cache, recipe, rank) as child,
        show_progress(title, len(PHASES), "phases") as progress,
    ):
        assert child.stdout is not None
        for done, name in enumerate(child.stdout, start=1):
            progress.advance_to(done, name.strip())
        exit_code = shell_exit_code(child.wait())
    if exit_code != 0:
        raise _explain_failure(folder, exit_code)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return TraceReport(report["graphs_compiled"], tuple(sorted(set(list_files(cache)) - before)))


@contextmanager
def _child(folder: Path, cache: Path, recipe: Recipe, rank: int) -> Iterator[subprocess.Popen[str]]:
    """Run the tracing process; it ends at any end of this one, with what it has started, such as g++."""
    command = [sys.executable, "-m", "services.compiler.trace", str(folder), str(rank)]
    with (folder / "log.txt").open("ab") as log, tempfile.TemporaryDirectory(prefix="millrace-") as plain:
        # Inductor splits its compiler's command line at spaces, and a root may have some.
        plain_cache = Path(plain, "cache")
        plain_cache.symlink_to(cache)
        backend = choose_backend(recipe.parallel.device)
        variables = backend.cache_environment(plain_cache, recipe) | backend.trace_environment(recipe)
        environment = {**os.environ, **variables, "TMPDIR": plain}
        with running_in_group(command, environment, stdout=subprocess.PIPE, stderr=log) as child:
            yield child


def _copy_files(source: Path, target: Path) -> None:
    """Copy a tree file by file: a full disk is then an OSError with its errno, unlike copytree's collected errors."""
    for path in list_files(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target / path)


def _explain_failure(folder: Path, exit_code: int) -> Exception:
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    free_bytes = shutil.disk_usage(folder).free
    if "No space left on device" in log or free_bytes < NEARLY_FULL_BYTES:
        return StorageError(
            f"{folder}: the disk filled up while compiling ({free_bytes:,} bytes free). "
            f"Free some space or pass another --root, and run the same command again."
        )
    killed = _KILLED.search(log)
    if exit_code > 128 or exit_code == 75 or killed:
        how = killed.group() if killed else f"exit code {exit_code}"
        return WorkersLost(
            f"a process was killed while it compiled ({how}); the log is {folder}/log.txt. "
            f"The same command tries again."
        )
    last_lines = "\n  ".join(log.strip().splitlines()[-12:])
    return DeviceError(
        f"compiling the train step failed (exit code {exit_code}). The whole log is {folder}/log.txt; it ends:\n"
        f"  {last_lines}"
    )
