"""Estimates how long neuronx-cc takes for graphs, from their sizes and the times of earlier graphs."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.common.artifacts.compile_cache import CompileCacheManifest
from services.common.artifacts.files import listed_file
from services.common.artifacts.store import Artifact, open_artifact, published_ids
from services.common.errors import ArtifactError
from services.common.hardware.instance_types import GIB, read_dollars_per_hour, read_pod_room
from services.common.launch.launcher import TaskDemand
from services.common.recipe.schema import Recipe
from services.compiler.neuron_cache import MODULES_FILE
from services.compiler.neuronx_cc import NO_COMPILER, CompiledModule

logger = logging.getLogger(__name__)

ASSUMED_SECONDS_PER_MB = 1_200.0
"""Compile seconds per MB of graph, assumed until graphs were compiled under the same root. libneuronxla's own message
says that a graph "may take up to one hour for large models", and the micro-batch graph of a 7B model has 3 MB.
"""

_RECORDS = TypeAdapter(tuple[CompiledModule, ...])


@dataclass(frozen=True)
class Rate:
    seconds_per_mb: float
    """Compile seconds per MB of graph, with as many CPUs as a task has."""
    source: str
    """Sentence that says where the rate comes from."""


@dataclass(frozen=True)
class NodeSize:
    cpus: int
    memory_gib: float
    type_name: str = ""
    """EC2 instance type of the node; empty where the node is a machine of another kind."""
    dollars_per_hour: float | None = None
    """List price of a node for an hour; None where it is not known."""

    def tasks(self, task_cpus: int, task_memory_gib: float) -> int:
        """Number of tasks that run on a node at the same time."""
        return TaskDemand(task_cpus, int(task_memory_gib * GIB)).count_on(self.cpus, self.memory_gib * GIB)

    def __str__(self) -> str:
        return f"{self.cpus} CPUs and {self.memory_gib:g} GiB" + (f" ({self.type_name})" if self.type_name else "")


CPU_NODE_TYPE = "m7i.8xlarge"
"""Default EC2 type of the nodes on which the compiler's pods run without a device."""
DEVICE_NODE_TYPE = "trn1.32xlarge"
"""EC2 type of the nodes on which the compiler's pods trace on a device, if the recipe names no trainer type."""


def node_type_of(recipe: Recipe) -> str:
    """Return the EC2 type of the nodes that trace and compile: the trainer's, or CPU nodes for `trace_on = "cpu"`."""
    if recipe.compile.trace_on == "cpu":
        return CPU_NODE_TYPE
    return recipe.cluster.trainer_instance_type or DEVICE_NODE_TYPE


def size_of(node_type: str) -> NodeSize:
    """Return the CPUs and memory of a compiler pod on this node type; a test in tests/k8s compares the manifests."""
    return NodeSize(*read_pod_room(node_type), node_type, read_dollars_per_hour(node_type))


def read_records(cache: Artifact[CompileCacheManifest]) -> tuple[CompiledModule, ...]:
    """Read the records of a published cache's graphs; none where neuronx-cc did not compile them.

    Raises `ArtifactError` when the file of records is damaged.
    """
    if all(entry.path != MODULES_FILE for entry in cache.manifest.files):
        return ()
    path = listed_file(cache.path, cache.manifest, MODULES_FILE)
    try:
        return _RECORDS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: expected a list of graph records of this version of the compiler: {error}"
        ) from error


def find_rate(root: Path, compiler: str, num_cpus: int) -> Rate:
    """Measure the rate on the caches under `root` that were compiled with `num_cpus` per task by version `compiler` of
    neuronx-cc, or by any version if `compiler` is `NO_COMPILER`. Without such caches the rate is assumed.
    """
    records: list[CompiledModule] = []
    for collection in sorted((root / "compile_cache").glob("*")):
        for found in published_ids(collection):
            try:
                records += read_records(open_artifact(collection / found, CompileCacheManifest))
            except ArtifactError as error:
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
