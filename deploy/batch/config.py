"""Reads `config.txt`: the queues, roles and log groups of an AWS account, one KEY=VALUE a line.

`make infra-up STACK=batch` writes the file; for queues and roles of another origin it is written by hand. The first
seven keys are those of AWS's own scripts for pre-training on AWS Batch.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from infra.shapes import Shape, find_shape
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES, Stage

CONFIG = Path(__file__).parent / "config.txt"
PLACES = ("REGION", "SUBNET", "SG", "ECR_REPO", "INSTANCE_ROLE", "FSX_DNS_NAME", "MOUNT_NAME")
POOLS = ("TRAINIUM", "CPU")
POOL_KEYS = ("QUEUE", "SHAPE", "MAX_NODES")
STAGE_KEYS = ("JOB_ROLE", "LOG_GROUP")
SECRETS = ("HF_TOKEN_SECRET", "WEBHOOK_SECRET")
OPTIONAL = ("CAPACITY_ENDS_AT", "CHECKPOINT_GB", "NOTICE_SECONDS", "EXECUTION_ROLE", *SECRETS)
REQUIRED = (
    *("NAME", "REGION", "ECR_REPO"),
    *(f"{pool}_{key}" for pool in POOLS for key in POOL_KEYS),
    *(f"{key}_{stage.upper()}" for key in STAGE_KEYS for stage in STAGES),
)
KEYS = (*PLACES, *(key for key in REQUIRED if key not in PLACES), *OPTIONAL)

_SECRET_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+")


@dataclass(frozen=True)
class JobQueue:
    """A job queue and its nodes. Each node runs one container of a stage."""

    name: str
    shape: Shape
    max_nodes: int


@dataclass(frozen=True)
class Config:
    """The values of `config.txt`."""

    name: str
    """Prefix of the names of job definitions and jobs."""
    region: str
    repository: str
    """Registry and prefix of the images' repositories."""
    trainium: JobQueue
    cpu: JobQueue
    job_roles: dict[Stage, str]
    log_groups: dict[Stage, str]
    capacity_ends_at: str
    """End of the capacity reservation for Trainium nodes (RFC 3339); empty where there is none."""
    checkpoint_gb: float | None
    """Size of the largest checkpoint, in 10^9 bytes, that a trainer commits within the machines' stop timeout; None
    where it is unknown."""
    notice_seconds: int
    """Termination notice of the machines, in seconds before a container is killed; 0 where it is unknown."""
    execution_role: str
    """Role that reads secrets for containers; empty where there are no secrets."""
    hugging_face_secret: str
    """ARN of the Hugging Face token in Secrets Manager; empty where there is none."""
    webhook_secret: str
    """ARN of the secret in Secrets Manager with the URL of the notices' webhook; empty where there is none."""

    def image_of(self, stage: Stage) -> str:
        """The name of the stage's image, without tag and digest."""
        return f"{self.repository}/{stage}"


def read_config(path: Path = CONFIG) -> Config:
    """Raises `RecipeError` for a missing file, unknown or missing keys, and wrong values."""
    values = read_values(path)
    if missing := [key for key in REQUIRED if not values.get(key)]:
        raise RecipeError(
            f"{path} has no value for {', '.join(missing)}: make infra-up STACK=batch writes all keys, or write those "
            f"of your account (docs/operations/batch.md explains them)"
        )
    pools = {pool: _read_pool(path, values, pool) for pool in POOLS}
    for pool, has_devices in (("TRAINIUM", True), ("CPU", False)):
        shape = pools[pool].shape
        if bool(shape.neuron_devices) != has_devices or shape.gpus:
            raise RecipeError(
                f"{path}: {pool}_SHAPE={shape.name} has {shape.neuron_devices} Neuron devices and {shape.gpus} GPUs: "
                f"TRAINIUM_SHAPE must have Neuron devices and CPU_SHAPE must have neither. Types with GPUs serve only "
                f"for plans"
            )
    secrets = [key for key in SECRETS if values.get(key)]
    if secrets and not values.get("EXECUTION_ROLE"):
        raise RecipeError(f"{path}: {secrets[0]} needs EXECUTION_ROLE, a role that may read the secret")
    # Batch takes the ARN of a secret and also the name of a parameter; an address here would be published.
    if wrong := next((key for key in secrets if not _SECRET_ARN.fullmatch(values[key])), ""):
        raise RecipeError(
            f"{path}: {wrong} is not the ARN of a secret, arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME. Its value "
            f"would stand in job definitions, so make a secret: aws secretsmanager create-secret"
        )
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
        webhook_secret=values.get("WEBHOOK_SECRET", ""),
    )


def read_values(path: Path) -> dict[str, str]:
    """Keys and values of a config.txt. Raises `RecipeError` for a file or a line that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}. It names the account's job queues: make infra-up STACK=batch writes it, "
            f"CONFIG=FILE names another file"
        ) from error
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Z_]+", key) or re.search(r"[\s\"']", value):
            raise RecipeError(f"{path}, line {number}: {line!r}; expected KEY=VALUE, without quotes and spaces")
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            meant = f"do you mean {near[0]}?" if near else f"known keys: {', '.join(KEYS)}"
            raise RecipeError(f"{path}, line {number}: unknown key {key}; {meant}")
        values[key] = value
    return values


def _read_number(path: Path, values: dict[str, str], key: str) -> float:
    """The number of a key; 0 where it has no value. Raises `RecipeError` for a negative one."""
    text = values.get(key) or "0"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise RecipeError(f"{path}: {key}={text}: expected a number from 0 on, such as {key}=157")
    return number


def _read_pool(path: Path, values: dict[str, str], pool: str) -> JobQueue:
    most = values[f"{pool}_MAX_NODES"]
    if not (most.isascii() and most.isdigit() and int(most)):
        raise RecipeError(f"{path}: {pool}_MAX_NODES={most}: expected a whole number from 1 on")
    return JobQueue(values[f"{pool}_QUEUE"], find_shape(values[f"{pool}_SHAPE"]), int(most))
