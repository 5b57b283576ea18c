"""The contract of a stage: the command, resources, mounts and environment that its container gets on every target.

AWS Batch's job definitions are rendered from it (`deploy/batch/job_definition.py`). The manifests of KubeRay's worker
groups (`k8s/stages`, `k8s/base/raycluster.yaml`) have the same values, which `tests/contract/test_targets.py` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.common.process.shutdown import DRAIN_TIMEOUT_VARIABLE, TRAINER_GRACE_SECONDS
from services.common.process.subcommands import ONE_OFF
from services.common.recipe.schema import Stage

ClusterMode = Literal["shared", "isolated"]
"""The Ray cluster of a deployment on KubeRay: the RayCluster that all stages share, or one of its own."""
MountKind = Literal["temporary", "memory", "shared", "recipe"]

RECIPE_FILE = "recipe.toml"

DEGREE = "--parallel.data_parallel_size"
"""The option of compiler and trainer that follows from the number of the trainer's nodes."""

DRAIN_VARIABLES = (DRAIN_TIMEOUT_VARIABLE, "RAY_JOB_STOP_WAIT_TIME_S")
"""Variables that hold the grace period: of a node that Ray drains, and of a driver that Ray stops."""


@dataclass(frozen=True)
class ContainerMount:
    """A folder that is mounted into the container."""

    name: str
    path: str
    kind: MountKind
    """Kind of storage: `temporary` is the container's own disk space and `memory` its own memory; `shared` is the
    artifact root, and `recipe` holds the recipe's file."""


SCRATCH = ContainerMount("scratch", "/scratch", "temporary")
ROOT = ContainerMount("fsx", "/fsx", "shared")
RECIPE = ContainerMount("recipe", "/recipe", "recipe")
SHARED_MEMORY = ContainerMount("shm", "/dev/shm", "memory")  # nosec B108 # a mount of the pod's own


@dataclass(frozen=True)
class Resources:
    """Resources that one container uses of its node."""

    cpus: int
    memory_gib: int
    storage_gib: int
    """Space on the node's own disks, in GiB."""
    huge_pages_gib: int = 0
    """Memory in pages of 2 MiB, which the Neuron runtime uses."""
    shared_memory_gib: int = 0
    """Size of /dev/shm, which Ray and the workers share, as a part of `memory_gib`. A container's default is 64 MiB."""
    neuron_devices: int = 0
    neuron_cores: int = 0
    """Number of physical NeuronCores, which Ray counts. A worker uses one, or two that form one logical core."""
    efa_cards: int = 0


@dataclass(frozen=True)
class SecretVariable:
    """A variable whose value appears in no manifest, record or log. The container starts without the secret as well."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True)
class StageContract:
    """The contract of one stage on nodes of one kind."""

    stage: Stage
    resources: Resources | None
    """Resources of the container; None where the manifests of a small machine set them."""
    environment: dict[str, str]
    """Environment variables, without DRAIN_VARIABLES."""
    drain_seconds: int
    """Grace period, in seconds before the container is killed; a checkpoint must fit into it."""
    mounts: tuple[ContainerMount, ...] = (SCRATCH, ROOT, RECIPE)
    secrets: tuple[SecretVariable, ...] = ()

    @property
    def repository(self) -> str:
        """Name of the image, without registry and version."""
        return f"millrace/{self.stage}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the container gets in addition to those of its image and its secrets."""
        return dict.fromkeys(DRAIN_VARIABLES, str(self.drain_seconds)) | self.environment

    def with_drain(self, seconds: int) -> StageContract:
        return replace(self, drain_seconds=seconds)


def size_variable(stage: str) -> str:
    """The variable or recipe key, for people, that sets the number of the stage's own nodes."""
    return "cluster.compiler_nodes" if stage == "compiler" else "NODES"


def make_command(stage: str, recipe_file: str, root: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs the stage. It is the same on a laptop, in a container and on every cluster."""
    return ["python", "-m", f"services.{stage}", "--recipe", recipe_file, "--root", root, *arguments]


def make_one_off_command(stage: str, root: str, words: Sequence[str], *, requires_mount: bool = False) -> list[str]:
    """The command that runs the subcommand `words` of the stage.

    `requires_mount` makes the container check that a file system is mounted at the root.
    """
    mount = ["--require-mount"] if requires_mount else []
    return ["python", "-m", f"services.{stage}", ONE_OFF, "--root", root, *mount, "--", *words]


RAY_ENVIRONMENT = {
    "RAY_START_ULIMIT_OPEN_FILES": "65536",
    "RAY_ROTATION_MAX_BYTES": "100000000",
    "RAY_ROTATION_BACKUP_COUNT": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The head checks a node five times. A node whose processes are gone refuses the checks, and is lost after some 6 s
    # instead of 16. A node that is frozen, or behind a network that drops packets, still has 10 s to answer a check.
    "RAY_health_check_period_ms": "1000",
    # Not Ray's 15: the node is there for its workers.
    "RAY_worker_niceness": "0",
}
TRAIN_ENVIRONMENT = {
    # Lists the run in the API of the head's dashboard. Ray Train reads both in the driver and hands the second on.
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # Seconds between two looks for nodes that drain; the default is 5.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}
EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "MALLOC_ARENA_MAX": "64",
}
HUGGING_FACE_TOKEN = SecretVariable("HF_TOKEN", secret="hugging-face", key="token")
"""Token for higher limits and gated repositories of the Hub. Only the tokenizer reads text and tokenizer files."""
DRAIN_SECONDS: dict[Stage, int] = {"tokenizer": 60, "compiler": 60, "trainer": TRAINER_GRACE_SECONDS}
ONE_OFF_DRAIN_SECONDS = 30
"""Grace period of a subcommand's container, in seconds: a subcommand publishes its whole result or none."""


def find_contract(stage: Stage, resources: Resources | None) -> StageContract:
    """The contract of a stage whose containers have these resources."""
    secrets = (HUGGING_FACE_TOKEN,) if stage == "tokenizer" else ()
    environment = RAY_ENVIRONMENT | TRAIN_ENVIRONMENT if stage == "trainer" else RAY_ENVIRONMENT
    contract = StageContract(stage, resources, environment, DRAIN_SECONDS[stage], secrets=secrets)
    if resources and resources.efa_cards:
        contract = replace(contract, environment=contract.environment | EFA_ENVIRONMENT)
    if resources and resources.shared_memory_gib:
        contract = replace(contract, mounts=(*contract.mounts, SHARED_MEMORY))
    return contract
