"""`python -m services.compiler plan`: lists a recipe's graphs for Neuron, and estimates the time of compiling them."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import SCRATCH_SUFFIX, Artifact, open_artifact
from services.common.errors import DeviceError, RecipeError
from services.common.process.command_line import Given
from services.common.program.fingerprint import program_facts
from services.common.recipe.schema import Compile, Recipe, fingerprint
from services.compiler import neuron_cache
from services.compiler.compile import trace_in_child
from services.compiler.estimate import (
    NodeSize,
    Rate,
    find_rate,
    makespan,
    node_type_of,
    nodes_within,
    read_records,
    size_of,
)
from services.compiler.fan_out import make_tasks
from services.compiler.neuronx_cc import CompileTask, find_compiled, target_of


def plan(given: Given, within_minutes: float | None, node_cpus: int | None, node_memory_gib: float | None) -> int:
    """Print the graphs, their core-hours, and the number of nodes that compile them within so many minutes.

    Needs torch_xla, but neither a Neuron device nor neuronx-cc. Raises `DeviceError` where torch_xla is not installed.
    """
    recipe = given.recipe
    if recipe.parallel.device != neuron_cache.DEVICE:
        raise RecipeError(
            f"parallel.device is {recipe.parallel.device!r}, and a plan is for 'xla' only: other devices compile their "
            f"graphs in one process on one node while it traces, so there is nothing to plan."
        )
    _require_torch_xla(given.recipe_path)
    facts = program_facts(recipe)
    address = compile_cache_address(given.root, recipe, fingerprint(facts))
    if (address.path / MANIFEST).exists():
        print(describe_published(open_artifact(address.path, CompileCacheManifest)))
        return 0
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        trace_in_child(recipe, Path(folder), "tracing", is_for_plan=True)
        modules = neuron_cache.traced_modules(Path(folder, "cache"))
        compiled = address.beside(SCRATCH_SUFFIX) / neuron_cache.COMPILED
        tasks = make_tasks(modules, compiled, target_of(recipe), recipe.compile)
        rate = find_rate(given.root, modules[0].compiler, recipe.compile.task_cpus)
        node = choose_node(recipe, node_cpus, node_memory_gib)
        print(describe_plan(tasks, recipe.compile, rate, node, within_minutes))
    return 0


def _require_torch_xla(recipe_path: Path) -> None:
    if importlib.util.find_spec("torch_xla") is None:
        raise DeviceError(
            f"a plan for Neuron traces the graphs with torch_xla, which is not installed; it needs neither a Trainium "
            f"nor neuronx-cc. On Linux, `make torch29` makes an environment with torch_xla (8 GB); then\n"
            f"  .venv-torch29/bin/python -m services.compiler plan --recipe {recipe_path}\n"
            f"or run `plan` in the compiler's neuron image, on any machine: make images STAGE=compiler VARIANT=neuron"
        )


def choose_node(recipe: Recipe, cpus: int | None, memory_gib: float | None) -> NodeSize:
    """Return the given node size; a part that is None is that of the recipe's own node type."""
    size = size_of(node_type_of(recipe))
    return size if cpus is memory_gib is None else NodeSize(cpus or size.cpus, memory_gib or size.memory_gib)


def describe_published(cache: Artifact[CompileCacheManifest]) -> str:
    """Return the plan of a cache that is published: a table of its graphs, and that nothing is left to compile."""
    rows = [(record.name, record.graph_bytes, "published") for record in read_records(cache)]
    return "\n".join([*_table(rows), f"already published: {cache.path}. Nothing is left to compile."])


def describe_plan(
    tasks: Sequence[CompileTask], settings: Compile, rate: Rate, node: NodeSize, within_minutes: float | None
) -> str:
    """Return a table of the graphs, and below it the estimate for the graphs that are not compiled yet."""
    missing = [task for task in tasks if find_compiled(task) is None]
    rows = [
        (task.module.name, task.module.graph_bytes, "to compile" if task in missing else "compiled") for task in tasks
    ]
    lines = _table(rows)
    if not missing:
        return "\n".join([*lines, "All graphs are compiled; the stage has only to publish them."])
    seconds = [task.module.graph_bytes / 1e6 * rate.seconds_per_mb for task in missing]
    core_hours = sum(seconds) * settings.task_cpus / 3600
    lines += [
        f"{len(missing)} of {len(tasks)} graphs to compile: about {core_hours:,.1f} core-hours, the largest graph "
        f"{max(seconds) / 60:,.0f} minutes",
        f"  at {rate.seconds_per_mb:,.0f} s per MB with compile.task_cpus = {settings.task_cpus} ({rate.source})",
    ]
    return "\n".join([*lines, *_describe_nodes(seconds, settings, node, within_minutes)])


def _describe_nodes(
    seconds: Sequence[float], settings: Compile, node: NodeSize, within_minutes: float | None
) -> list[str]:
    per_node = node.tasks(settings.task_cpus, settings.task_memory_gib)
    if per_node == 0:
        return [
            f"A node of {node} holds no task of compile.task_cpus = {settings.task_cpus} and compile.task_memory_gib = "
            f"{settings.task_memory_gib:g}: use larger nodes, or lower one of the two."
        ]
    at_a_time = min(per_node, settings.num_workers)
    why = " (compile.num_workers)" if at_a_time < min(per_node, len(seconds)) else ""
    took = makespan(seconds, at_a_time)
    one = f"1 node of {node}, with {at_a_time} concurrent tasks{why}: {took / 60:,.0f} minutes{_price(node, took)}"
    if within_minutes is None:
        return [one]
    nodes = nodes_within(seconds, per_node, within_minutes * 60)
    if nodes is None:
        reason = f"the largest graph alone takes {max(seconds) / 60:,.0f} minutes"
        return [one, f"within {within_minutes:g} minutes: impossible with any number of nodes; {reason}"]
    workers = min(nodes * per_node, len(seconds))
    took = makespan(seconds, nodes * per_node)
    return [
        one,
        f"within {within_minutes:g} minutes: {nodes} nodes of {node}, done in {took / 60:,.0f}"
        f"{_price(node, nodes * took)}: --cluster.compiler_nodes={nodes} --compile.num_workers={workers}",
    ]


def _price(node: NodeSize, seconds: float) -> str:
    """Return the price of these node-seconds, as the end of a line; empty where the node's price is not known."""
    if node.dollars_per_hour is None:
        return ""
    return f", ${node.dollars_per_hour * seconds / 3600:,.2f} at ${node.dollars_per_hour:,.2f} for a node-hour"


def _table(rows: Sequence[tuple[str, int, str]]) -> list[str]:
    width = max([len("graph"), *(len(name) for name, _, _ in rows)])
    return [
        f"{'graph':<{width}}  {'bytes':>13}  state",
        *(f"{name:<{width}}  {graph_bytes:>13,}  {state}" for name, graph_bytes, state in rows),
    ]
