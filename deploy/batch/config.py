"""`config.txt`: what a deployment on AWS Batch has to know of the account, a line of KEY=VALUE each.

Its first seven keys are those of the older scripts for AWS Batch. `make infra-up STACK=batch` writes the file, and who
made queues and roles in another way writes it by hand.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from infra.shapes import Shape, find_shape
from services.common.errors import RecipeError
from services.common.input.credentials import mask
from services.common.input.files import read_file
from services.common.recipe.schema import STAGES, Stage

CONFIG = Path(__file__).parent / "config.txt"
PLACES = ("REGION", "SUBNET", "SG", "ECR_REPO", "INSTANCE_ROLE", "FSX_DNS_NAME", "MOUNT_NAME")
POOLS = ("TRAINIUM", "CPU")
OF_A_POOL = ("QUEUE", "SHAPE", "MAX_NODES")
OF_A_STAGE = ("JOB_ROLE", "LOG_GROUP")
OPTIONAL = ("CAPACITY_ENDS_AT", "CHECKPOINT_GB", "NOTICE_SECONDS", "EXECUTION_ROLE", "HF_TOKEN_SECRET")
NEEDED = (
    *("NAME", "REGION", "ECR_REPO"),
    *(f"{pool}_{key}" for pool in POOLS for key in OF_A_POOL),
    *(f"{key}_{stage.upper()}" for key in OF_A_STAGE for stage in STAGES),
)
KEYS = (*PLACES, *(key for key in NEEDED if key not in PLACES), *OPTIONAL)


@dataclass(frozen=True)
class Pool:
    """A queue, and the nodes behind it, each of which holds one container of a stage."""

    queue: str
    shape: Shape
    max_nodes: int


@dataclass(frozen=True)
class Config:
    """The account as deployments see it."""

    name: str
    """Job definitions begin with it."""
    region: str
    repository: str
    """Registry and prefix of the images' repositories."""
    trainium: Pool
    cpu: Pool
    job_roles: dict[Stage, str]
    log_groups: dict[Stage, str]
    capacity_ends_at: str
    """Of the reservation behind Trainium's nodes, RFC 3339; empty: it has no end."""
    checkpoint_gb: float | None
    """Size of the largest checkpoint, in 10^9 bytes, that a trainer commits within the machines' stop timeout; None
    where nobody has said it."""
    notice_seconds: int
    """Seconds between a trainer's notice and the end of its container that the machines allow; 0 where nobody has said
    it."""
    execution_role: str
    """That gives secrets to containers; empty: there are none."""
    hugging_face_secret: str
    """ARN in Secrets Manager; empty: there is none."""

    def image_of(self, stage: Stage) -> str:
        """Without a version."""
        return f"{self.repository}/{stage}"


def read_config(path: Path = CONFIG) -> Config:
    """Raises `RecipeError` for a file that is absent, keys that are unknown or lacking, and values that cannot be."""
    values = read_values(path)
    if lacking := [key for key in NEEDED if not values.get(key)]:
        raise RecipeError(
            f"{path} does not say {', '.join(lacking)}: make infra-up STACK=batch writes all, or write what your "
            f"account has (docs/operations/batch.md tells what each is)"
        )
    pools = {pool: _read_pool(path, values, pool) for pool in POOLS}
    for pool, has_devices in (("TRAINIUM", True), ("CPU", False)):
        shape = pools[pool].shape
        if bool(shape.neuron_devices) != has_devices or shape.gpus:
            raise RecipeError(
                f"{path}: {pool}_SHAPE={shape.name} has {shape.neuron_devices} Neuron devices and {shape.gpus} GPUs: "
                f"TRAINIUM_SHAPE is a type with Neuron devices, CPU_SHAPE one with neither. Types with GPUs are for "
                f"plans alone"
            )
    if values.get("HF_TOKEN_SECRET") and not values.get("EXECUTION_ROLE"):
        raise RecipeError(f"{path}: HF_TOKEN_SECRET needs EXECUTION_ROLE, which may read that secret for a container")
    return Config(
        name=values["NAME"],
        region=values["REGION"],
        repository=values["ECR_REPO"].rstrip("/"),
        trainium=pools["TRAINIUM"],
        cpu=pools["CPU"],
        job_roles={stage: values[f"JOB_ROLE_{stage.upper()}"] for stage in STAGES},
        log_groups={stage: values[f"LOG_GROUP_{stage.upper()}"] for stage in STAGES},
        capacity_ends_at=values.get("CAPACITY_ENDS_AT", ""),
        checkpoint_gb=_read_number(path, values, "CHECKPOINT_GB") or None,
        notice_seconds=math.floor(_read_number(path, values, "NOTICE_SECONDS")),
        execution_role=values.get("EXECUTION_ROLE", ""),
        hugging_face_secret=values.get("HF_TOKEN_SECRET", ""),
    )


def read_values(path: Path) -> dict[str, str]:
    """The lines of a config.txt; blank ones and comments aside. Raises `RecipeError`."""
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}. It says where jobs run: make infra-up STACK=batch writes it, CONFIG=FILE "
            f"names another"
        ) from error
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Z_]+", key) or re.search(r"[\s\"']", value):
            raise RecipeError(f"{path}, line {number}: {line!r}; expected KEY=VALUE, without quotes and blanks")
        if mask(value) != value:
            raise RecipeError(
                f"{path}, line {number}: {key} holds a user or a password, which job definitions would show"
            )
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            meant = f"do you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise RecipeError(f"{path}, line {number}: unknown key {key}; {meant}")
        values[key] = value
    return values


def _read_number(path: Path, values: dict[str, str], key: str) -> float:
    """0 for a key without a value."""
    text = values.get(key) or "0"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise RecipeError(f"{path}: {key}={text}: a number is expected, such as {key}=157")
    return number


def _read_pool(path: Path, values: dict[str, str], pool: str) -> Pool:
    most = values[f"{pool}_MAX_NODES"]
    if not (most.isascii() and most.isdigit() and int(most)):
        raise RecipeError(f"{path}: {pool}_MAX_NODES={most}: a whole number from 1 on is expected")
    return Pool(values[f"{pool}_QUEUE"], find_shape(values[f"{pool}_SHAPE"]), int(most))
