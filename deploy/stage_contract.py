"""The contract of a stage: what every target gives to the stage's container, and what the container may rely on.

A target renders it in its own words: for KubeRay `k8s/client/settings.py` puts it into the worker groups, for AWS Batch
`deploy/batch/job_definition.py` makes a job definition of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.common.process.subcommands import ONE_OFF
from services.common.process.termination_notice import NOTICE_VARIABLE, TRAINER_NOTICE_SECONDS
from services.common.recipe.schema import Stage

MountKind = Literal["temporary", "memory", "shared", "recipe"]

RECIPE_FILE = "recipe.toml"

# What Ray gives to a node that is told to leave, and to a driver that is told to stop, before it ends them.
DRAIN_VARIABLES = (NOTICE_VARIABLE, "RAY_JOB_STOP_WAIT_TIME_S")


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
    neuron_cores: int = 0
    """Physical ones, which Ray counts: a worker takes one, or two where they are one to it."""
    efa_cards: int = 0


@dataclass(frozen=True)
class SecretVariable:
    """A variable whose value is in no manifest, record or log. Without the secret the container starts, too."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True)
class StageContract:
    """One stage on nodes of one kind."""

    stage: Stage
    resources: Resources | None
    """None: what a small machine can spare."""
    environment: dict[str, str]
    """Without what Ray is told of the drain."""
    drain_seconds: int
    """Between a container's notice and its end: a checkpoint must fit."""
    mounts: tuple[Mount, ...] = (SCRATCH, ROOT, RECIPE)
    secrets: tuple[SecretVariable, ...] = ()

    @property
    def repository(self) -> str:
        """The image's name, without a registry and a version."""
        return f"millrace/{self.stage}"

    @property
    def variables(self) -> dict[str, str]:
        """The whole environment that the container gets besides its image's and its secrets."""
        return dict.fromkeys(DRAIN_VARIABLES, str(self.drain_seconds)) | self.environment

    def with_drain(self, seconds: int) -> StageContract:
        return replace(self, drain_seconds=seconds)


def make_command(stage: str, recipe_file: str, root: str, arguments: Sequence[str]) -> list[str]:
    """The stage's command: the same on a laptop, in a container and on every cluster."""
    return ["python", "-m", f"services.{stage}", "--recipe", recipe_file, "--root", root, *arguments]


def make_one_off_command(
    stage: str, root: str, words: Sequence[str], bring: Sequence[str] = (), *, requires_mount: bool = False
) -> list[str]:
    """The command of a container that runs one subcommand of the stage, `words`, and brings files home.

    `requires_mount`: whoever starts the container cannot tell whether the file system is mounted at the root.
    """
    files = [option for path in bring for option in ("--bring", path)]
    mount = ["--require-mount"] if requires_mount else []
    return ["python", "-m", f"services.{stage}", ONE_OFF, "--root", root, *mount, *files, "--", *words]


RAY_ENVIRONMENT = {
    "RAY_START_ULIMIT_OPEN_FILES": "65536",
    "RAY_ROTATION_MAX_BYTES": "100000000",
    "RAY_ROTATION_BACKUP_COUNT": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Of the head's five checks of a node: one whose processes are gone refuses them at once, and is lost after some 6 s
    # in place of 16. One that is frozen, or behind a network that drops packets, still has 10 s to answer each of them.
    "RAY_health_check_period_ms": "1000",
}
EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "MALLOC_ARENA_MAX": "64",
}
# Raises the Hub's limits, and opens what is gated there. The tokenizer alone reads text and vocabularies.
HUGGING_FACE_TOKEN = SecretVariable("HF_TOKEN", secret="hugging-face", key="token")
DRAIN_SECONDS: dict[Stage, int] = {"tokenizer": 60, "compiler": 60, "trainer": TRAINER_NOTICE_SECONDS}
ONE_OFF_DRAIN_SECONDS = 30
"""Seconds from the notice of a subcommand's container to its end. A subcommand publishes its whole result or none."""


def find_contract(stage: Stage, resources: Resources | None) -> StageContract:
    """The contract with which a stage is deployed where a pod gets so much."""
    secrets = (HUGGING_FACE_TOKEN,) if stage == "tokenizer" else ()
    contract = StageContract(stage, resources, RAY_ENVIRONMENT, DRAIN_SECONDS[stage], secrets=secrets)
    if resources and resources.efa_cards:
        contract = replace(contract, environment=contract.environment | EFA_ENVIRONMENT)
    if resources and resources.shared_memory_gib:
        contract = replace(contract, mounts=(*contract.mounts, SHARED_MEMORY))
    return contract
