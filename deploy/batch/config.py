"""Reads `config.txt`: the queues, roles and log groups of an AWS account, one KEY=VALUE a line.

`make infra-up STACK=batch` writes the file; for queues and roles of another origin it is written by hand. The first
seven keys are those of AWS's own scripts for pre-training on AWS Batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt, ValidationError

from infra.shapes import Shape, find_shape
from services.common.errors import RecipeError
from services.common.recipe.schema import STAGES, Stage

CONFIG = Path(__file__).parent / "config.txt"
SECRETS = ("HF_TOKEN_SECRET", "WEBHOOK_SECRET")
# Batch takes the ARN of a secret and also the name of a parameter; an address here would be published in definitions.
SecretArn = Annotated[str, Field(pattern=r"^arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+")]


@dataclass(frozen=True)
class JobQueue:
    """A job queue and its nodes. Each node runs one container of a stage."""

    name: str
    shape: Shape
    max_nodes: int


class Config(BaseModel):
    """The values of `config.txt`, by their keys in lower case. Optional ones are empty where there are none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    region: str
    subnet: str = ""
    sg: str = ""
    ecr_repo: str
    """Registry and prefix of the images' repositories."""
    instance_role: str = ""
    fsx_dns_name: str = ""
    mount_name: str = ""
    name: str
    """Prefix of the names of job definitions and jobs."""
    trainium_queue: str
    trainium_shape: str
    trainium_max_nodes: PositiveInt
    cpu_queue: str
    cpu_shape: str
    cpu_max_nodes: PositiveInt
    job_role_tokenizer: str
    job_role_compiler: str
    job_role_trainer: str
    log_group_tokenizer: str
    log_group_compiler: str
    log_group_trainer: str
    capacity_ends_at: str = ""
    """End of the capacity reservation for Trainium nodes (RFC 3339)."""
    checkpoint_gb: NonNegativeFloat = 0
    """Size of the largest checkpoint, in 10^9 bytes, that a trainer commits within the machines' stop timeout; 0 where
    it is unknown."""
    notice_seconds: NonNegativeFloat = 0
    """Grace period of the machines, in seconds before a container is killed; 0 where it is unknown."""
    execution_role: str = ""
    """Role that reads secrets for containers."""
    hf_token_secret: SecretArn | None = None
    """Secret with the Hugging Face token."""
    webhook_secret: SecretArn | None = None
    """Secret with the URL of the notices' webhook."""

    @property
    def trainium(self) -> JobQueue:
        return JobQueue(self.trainium_queue, find_shape(self.trainium_shape), self.trainium_max_nodes)

    @property
    def cpu(self) -> JobQueue:
        return JobQueue(self.cpu_queue, find_shape(self.cpu_shape), self.cpu_max_nodes)

    @property
    def job_roles(self) -> dict[Stage, str]:
        return {stage: getattr(self, f"job_role_{stage}") for stage in STAGES}

    @property
    def log_groups(self) -> dict[Stage, str]:
        return {stage: getattr(self, f"log_group_{stage}") for stage in STAGES}

    def image_of(self, stage: Stage) -> str:
        """The name of the stage's image, without tag and digest."""
        return f"{self.ecr_repo.rstrip('/')}/{stage}"


def read_config(path: Path = CONFIG) -> Config:
    """Raises `RecipeError` for a missing file, unknown or missing keys, and wrong values."""
    try:
        config = Config.model_validate({key.lower(): value for key, value in _read_values(path).items() if value})
    except ValidationError as error:
        wrong = "; ".join(
            f"{str(each['loc'][0]).upper()}={'' if each['type'] == 'missing' else each['input']}: {each['msg']}"
            for each in error.errors()
        )
        raise RecipeError(
            f"{path}: {wrong}. make infra-up STACK=batch writes all keys; docs/operations/batch.md explains them"
        ) from error
    if (config.hf_token_secret or config.webhook_secret) and not config.execution_role:
        raise RecipeError(f"{path}: {' and '.join(SECRETS)} need EXECUTION_ROLE, a role that may read the secret")
    return config


def _read_values(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}. It names the account's job queues: make infra-up STACK=batch writes it, "
            f"CONFIG=FILE names another file"
        ) from error
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if wrong := [line for line in lines if not re.fullmatch(r"[A-Z_]+=[^\s\"']*", line)]:
        raise RecipeError(f"{path}: {wrong[0]!r}; expected KEY=VALUE, without quotes and spaces")
    return dict(line.split("=", 1) for line in lines)
