"""How long neuronx-cc would take for graphs: by their size, and by what earlier graphs took."""

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
from services.common.input.files import read_file
from services.common.launch.launcher import TaskDemand
from services.common.recipe.schema import Recipe
from services.compiler.neuron_cache import MODULES_FILE
from services.compiler.neuronx_cc import NO_COMPILER, CompiledModule

logger = logging.getLogger(__name__)

ASSUMED_SECONDS_PER_MB = 1_200.0
"""Until graphs were compiled under the same root. libneuronxla tells its users of a graph that it "may take up to one
hour for large models", and that of a 7B model's micro-batch has 3 MB.
"""

_RECORDS = TypeAdapter(tuple[CompiledModule, ...])


@dataclass(frozen=True)
class Rate:
    seconds_per_mb: float
    """Of the graph, with the CPUs of a task."""
    source: str


@dataclass(frozen=True)
class NodeSize:
    cpus: int
    memory_gib: float
    type_name: str = ""
    """EC2 instance type of the node; empty where the node is a machine of another kind."""
    dollars_per_hour: float | None = None
    """Price of a node for an hour, a hint; None where nobody has said it."""

    def tasks(self, task_cpus: int, task_memory_gib: float) -> int:
        """That run on a node at the same time."""
        return TaskDemand(task_cpus, int(task_memory_gib * GIB)).count_on(self.cpus, self.memory_gib * GIB)

    def __str__(self) -> str:
        return f"{self.cpus} CPUs and {self.memory_gib:g} GiB" + (f" ({self.type_name})" if self.type_name else "")


CPU_NODE_TYPE = "m7i.8xlarge"
"""Type of the nodes on which the compiler's pods run without a device, if a cluster's operators chose no other."""
DEVICE_NODE_TYPE = "trn1.32xlarge"
"""Type of the nodes on which the compiler's pods trace on a device, where a recipe names none for the trainer."""


def node_type_of(recipe: Recipe) -> str:
    """Type of the nodes on which graphs are compiled: those of their trace, which is on a device or anywhere."""
    if recipe.compile.trace_on == "cpu":
        return CPU_NODE_TYPE
    return recipe.cluster.trainer_instance_type or DEVICE_NODE_TYPE


def size_of(node_type: str) -> NodeSize:
    """What a pod of the compiler has on such a node; a test in tests/k8s holds it to the manifests."""
    return NodeSize(*read_pod_room(node_type), node_type, read_dollars_per_hour(node_type))


def read_records(cache: Artifact[CompileCacheManifest]) -> tuple[CompiledModule, ...]:
    """What a published cache says of its graphs; nothing where neuronx-cc did not compile them.

    Raises `ArtifactError` when that is damaged.
    """
    if all(entry.path != MODULES_FILE for entry in cache.manifest.files):
        return ()
    path = listed_file(cache.path, cache.manifest, MODULES_FILE)
    try:
        return _RECORDS.validate_json(read_file(path))
    except ValidationError as error:
        raise ArtifactError(f"{path}: not what this version of the stage writes: {error}") from error


def find_rate(root: Path, compiler: str, num_cpus: int) -> Rate:
    """From the caches under `root` that this version of neuronx-cc compiled with as many CPUs a task (any version where
    there is none here), else assumed.
    """
    records: list[CompiledModule] = []
    for collection in sorted((root / "compile_cache").glob("*")):
        for found in published_ids(collection):
            try:
                records += read_records(open_artifact(collection / found, CompileCacheManifest))
            except ArtifactError as error:
                logger.warning("not used for the estimate: %s", error)
    alike = [each for each in records if each.num_cpus == num_cpus and compiler in (each.compiler, NO_COMPILER)]
    megabytes = sum(record.graph_bytes for record in alike) / 1e6
    if not alike:
        return Rate(ASSUMED_SECONDS_PER_MB, f"assumed: no graph was compiled under {root} with such tasks")
    rate = sum(record.seconds for record in alike) / megabytes
    return Rate(rate, f"measured on {len(alike)} graphs of {megabytes:,.1f} MB that were published under {root}")


def makespan(seconds: Iterable[float], slots: int) -> float:
    """Until all are done, with `slots` at a time and the longest first."""
    free_at = [0.0] * slots
    for each in sorted(seconds, reverse=True):
        heapq.heapreplace(free_at, free_at[0] + each)
    return max(free_at)


def nodes_within(seconds: Sequence[float], tasks_per_node: int, limit_seconds: float) -> int | None:
    """The fewest nodes that are done in time; None where one graph alone takes longer."""
    for nodes in range(1, len(seconds) + 1):
        if makespan(seconds, nodes * tasks_per_node) <= limit_seconds:
            return nodes
    return None
