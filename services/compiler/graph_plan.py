"""`python -m services.compiler plan`: lists a recipe's graphs for Neuron, and estimates the time of compiling them from
their sizes and the times of earlier graphs.
"""

from __future__ import annotations

import heapq
import importlib.util
import logging
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from services.common.artifacts.compile_cache import CompileCacheManifest, compile_cache_address
from services.common.artifacts.files import listed_file
from services.common.artifacts.manifest import MANIFEST
from services.common.artifacts.store import SCRATCH_SUFFIX, open_artifact, published_ids
from services.common.errors import ArtifactError, DeviceError, RecipeError
from services.common.hardware.instance_types import GIB, read_dollars_per_hour, read_pod_room
from services.common.launch.launcher import TaskDemand
from services.common.process.command_line import Given
from services.common.program.fingerprint import program_facts
from services.common.recipe.compilation import Compile
from services.common.recipe.schema import Recipe, fingerprint
from services.compiler import neuron_cache
from services.compiler.compile import trace_in_child
from services.compiler.fan_out import make_tasks
from services.compiler.neuronx_cc import NO_COMPILER, CompiledModule, CompileTask, find_compiled

logger = logging.getLogger(__name__)

ASSUMED_SECONDS_PER_MB = 1_200.0
"""Compile seconds per MB of graph, assumed until graphs were compiled under the same root. libneuronxla's own message
says that a graph "may take up to one hour for large models", and the micro-batch graph of a 7B model has 3 MB.
"""

_RECORDS = TypeAdapter(tuple[CompiledModule, ...])


class Rate(NamedTuple):
    seconds_per_mb: float
    """Compile seconds per MB of graph, with as many CPUs as a task has."""
    source: str
    """Sentence that says where the rate comes from."""


class NodeSize(NamedTuple):
    cpus: int
    memory_gib: float
    type_name: str
    """EC2 instance type of the node."""
    dollars_per_hour: float | None = None
    """List price of a node for an hour; None where it is not known."""

    def __str__(self) -> str:
        return f"{self.cpus} CPUs and {self.memory_gib:g} GiB ({self.type_name})"


CPU_NODE_TYPE = "m7i.8xlarge"
"""Default EC2 type of the nodes on which the compiler's pods run without a device."""
DEVICE_NODE_TYPE = "trn1.32xlarge"
"""EC2 type of the nodes on which the compiler's pods trace on a device, if the recipe names no trainer type."""


def plan(given: Given, within_minutes: float | None) -> int:
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
        published = open_artifact(address.path, CompileCacheManifest).manifest.compile_cache
        print(
            f"already published: {address.path}, with {published.graphs_compiled} graphs. Nothing is left to compile."
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        trace_in_child(recipe, Path(folder), "tracing", is_for_plan=True)
        modules = neuron_cache.traced_modules(Path(folder, "cache"))
        compiled = address.beside(SCRATCH_SUFFIX) / neuron_cache.COMPILED
        tasks = make_tasks(modules, compiled, recipe.compile)
        rate = find_rate(given.root, modules[0].compiler, recipe.compile.task_cpus)
        print(describe_plan(tasks, recipe.compile, rate, size_of(node_type_of(recipe)), within_minutes))
    return 0


def _require_torch_xla(recipe_path: Path) -> None:
    if importlib.util.find_spec("torch_xla") is None:
        raise DeviceError(
            f"a plan for Neuron traces the graphs with torch_xla, which is not installed. On Linux, `make torch29` "
            f"makes an environment that has it (8 GB); then\n"
            f"  .venv-torch29/bin/python -m services.compiler plan --recipe {recipe_path}\n"
            f"or run `plan` in the compiler's neuron image, on any machine: make images STAGE=compiler VARIANT=neuron"
        )


def describe_plan(
    tasks: Sequence[CompileTask], settings: Compile, rate: Rate, node: NodeSize, within_minutes: float | None
) -> str:
    """Return a table of the graphs, and below it the estimate for the graphs that are not compiled yet."""
    missing = [task for task in tasks if find_compiled(task) is None]
    rows = [
        (task.module.name, task.module.graph_bytes, "to compile" if task in missing else "compiled") for task in tasks
    ]
    width = max([len("graph"), *(len(name) for name, _, _ in rows)])
    lines = [
        f"{'graph':<{width}}  {'bytes':>13}  state",
        *(f"{name:<{width}}  {graph_bytes:>13,}  {state}" for name, graph_bytes, state in rows),
    ]
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
    demand = TaskDemand(settings.task_cpus, int(settings.task_memory_gib * GIB))
    per_node = demand.count_on(node.cpus, node.memory_gib * GIB)
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


def node_type_of(recipe: Recipe) -> str:
    """Return the EC2 type of the nodes that trace and compile: the trainer's, or CPU nodes for `trace_on = "cpu"`."""
    if recipe.compile.trace_on == "cpu":
        return CPU_NODE_TYPE
    return recipe.cluster.trainer_instance_type or DEVICE_NODE_TYPE


def size_of(node_type: str) -> NodeSize:
    """Return the CPUs and memory of a compiler pod on this node type; a test in tests/k8s compares the manifests."""
    return NodeSize(*read_pod_room(node_type), node_type, read_dollars_per_hour(node_type))


def find_rate(root: Path, compiler: str, num_cpus: int) -> Rate:
    """Measure the rate on the caches under `root` that were compiled with `num_cpus` per task by version `compiler` of
    neuronx-cc, or by any version if `compiler` is `NO_COMPILER`. Without such caches the rate is assumed.
    """
    records: list[CompiledModule] = []
    for collection in sorted((root / "compile_cache").glob("*")):
        for found in published_ids(collection):
            try:
                cache = open_artifact(collection / found, CompileCacheManifest)
                if any(entry.path == neuron_cache.MODULES_FILE for entry in cache.manifest.files):
                    path = listed_file(cache.path, cache.manifest, neuron_cache.MODULES_FILE)
                    records += _RECORDS.validate_json(path.read_bytes())
            except (ArtifactError, ValidationError) as error:
                logger.warning("the estimate ignores a compile cache: %s", error)
    alike = [each for each in records if each.num_cpus == num_cpus and compiler in (each.compiler, NO_COMPILER)]
    megabytes = sum(record.graph_bytes for record in alike) / 1e6
    if not alike:
        return Rate(
            ASSUMED_SECONDS_PER_MB, f"assumed: no graph was compiled under {root} with {num_cpus} CPUs per task"
        )
    rate = sum(record.seconds for record in alike) / megabytes
    return Rate(rate, f"measured on {len(alike)} graphs of {megabytes:,.1f} MB published under {root}")


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Return the seconds until all tasks are done, `slots` at a time and the longest first."""
    free_at = [0.0] * slots
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(free_at, free_at[0] + each)
    return max(free_at)


def nodes_within(seconds: Sequence[float], tasks_per_node: int, limit_seconds: float) -> int | None:
    """Return the smallest number of nodes that meets the limit; None where one graph alone takes longer."""
    for nodes in range(1, len(seconds) + 1):
        if makespan(seconds, nodes * tasks_per_node) <= limit_seconds:
            return nodes
    return None
