"""The contract of a stage: what every target gives to the stage's container, and what the container may rely on.

A target renders it in its own words. KubeRay's are the worker groups in k8s/stages, which a test holds against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.common.recipe import Stage

MountKind = Literal["temporary", "memory", "shared", "recipe"]
Variant = Literal["cpu", "neuron"]

RECIPE_FILE = "recipe.toml"

# What Ray gives to a node that is told to leave, and to a driver that is told to stop, before it ends them.
DRAIN_VARIABLES = ("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "RAY_JOB_STOP_WAIT_TIME_S")


@dataclass(frozen=True)
class Mount:
    """A folder of the container."""

    name: str
    path: str
    kind: MountKind
    """`temporary` is the container's own, on disk, and `memory` too, in memory; `shared` is the artifact root, and
    `recipe` holds the recipe's file."""

    @property
    def is_read_only(self) -> bool:
        return self.kind == "recipe"


SCRATCH = Mount("scratch", "/scratch", "temporary")
ROOT = Mount("fsx", "/fsx", "shared")
RECIPE = Mount("recipe", "/recipe", "recipe")
SHARED_MEMORY = Mount("shm", "/dev/shm", "memory")


@dataclass(frozen=True)
class Resources:
    """What one container takes of its node."""

    cpus: int
    memory_gib: int
    storage_gib: int
    """Of the node's own disk."""
    huge_pages_gib: int = 0
    """In pages of 2 MiB, which the Neuron runtime takes."""
    shared_memory_gib: int = 0
    """Of `memory_gib`, what Ray and the workers of a node may share; containers get 64 MiB of themselves."""
    neuron_devices: int = 0
    efa_cards: int = 0


@dataclass(frozen=True)
class StageContract:
    """One stage on nodes of one variant."""

    stage: Stage
    resources: Resources | None
    """None: what a small machine can spare."""
    environment: dict[str, str]
    """Without what Ray is told of the drain."""
    drain_seconds: int
    """Between a container's notice and its end: a checkpoint must fit."""
    mounts: tuple[Mount, ...] = (SCRATCH, ROOT, RECIPE)

    @property
    def repository(self) -> str:
        """The image's name, without a registry and a version."""
        return f"millrace/{self.stage}"

    @property
    def variables(self) -> dict[str, str]:
        """The whole environment that the container gets besides its image's."""
        return dict.fromkeys(DRAIN_VARIABLES, str(self.drain_seconds)) | self.environment

    def on_trainium(self) -> StageContract:
        """The stage on whole Trainium nodes."""
        environment, mounts = self.environment | EFA_ENVIRONMENT, (*self.mounts, SHARED_MEMORY)
        return replace(self, resources=TRN1_32XLARGE, environment=environment, mounts=mounts)

    def with_drain(self, seconds: int) -> StageContract:
        return replace(self, drain_seconds=seconds)


def make_command(stage: str, recipe_folder: str, root: str, arguments: Sequence[str]) -> list[str]:
    """The stage's command: the same on a laptop, in a container and on every cluster."""
    recipe = f"{recipe_folder}/{RECIPE_FILE}"
    return ["python", "-m", f"services.{stage}", "--recipe", recipe, "--root", root, *arguments]


RAY_ENVIRONMENT = {
    "RAY_START_ULIMIT_OPEN_FILES": "65536",
    "RAY_ROTATION_MAX_BYTES": "100000000",
    "RAY_ROTATION_BACKUP_COUNT": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "MALLOC_ARENA_MAX": "64",
}
TRN1_32XLARGE = Resources(
    cpus=120,
    memory_gib=440,
    storage_gib=400,
    huge_pages_gib=10,
    shared_memory_gib=64,
    neuron_devices=16,
    efa_cards=8,
)
CPU_NODE = Resources(cpus=14, memory_gib=48, storage_gib=100)
# Of 32 CPUs and 128 GiB: three of the compile tasks that a recipe has by default, or one that was killed for memory and
# has twice as much.
COMPILE_NODE = Resources(cpus=30, memory_gib=112, storage_gib=100)
DRAIN_SECONDS: dict[Stage, int] = {"tokenizer": 60, "compiler": 60, "trainer": 300}


def find_contract(stage: Stage, variant: Variant) -> StageContract:
    """The contract with which a stage is deployed on nodes of the variant."""
    drain_seconds = DRAIN_SECONDS[stage]
    if variant == "cpu":
        return StageContract(stage, None, RAY_ENVIRONMENT, drain_seconds)
    if stage == "tokenizer":
        return StageContract(stage, CPU_NODE, RAY_ENVIRONMENT, drain_seconds)
    if stage == "compiler":
        return StageContract(stage, COMPILE_NODE, RAY_ENVIRONMENT, drain_seconds)
    return StageContract(stage, None, RAY_ENVIRONMENT, drain_seconds).on_trainium()
