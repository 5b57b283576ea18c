"""Small real objects for the tests of this folder: an account's config.txt, and a deployment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.batch.config import Config, read_config
from deploy.batch.job_definition import JobSpec
from deploy.client.request import DeployRequest
from deploy.client.requested_recipe import parse_requested_recipe
from services.common.recipe.schema import Stage
from services.common.testing.recipes import recipe_text

Ask = Callable[..., DeployRequest]
DIGEST = "0" * 64
REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com/millrace"
ROLE = "arn:aws:iam::111122223333:role"
VALUES = {
    "REGION": "us-west-2",
    "SUBNET": "subnet-0123456789abcdef0",
    "SG": "sg-0123456789abcdef0,sg-0123456789abcdef1",
    "ECR_REPO": REGISTRY,
    "INSTANCE_ROLE": "millrace-us-west-2-node",
    "FSX_DNS_NAME": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
    "MOUNT_NAME": "abcdefgh",
    "NAME": "millrace",
    "TRAINIUM_QUEUE": "millrace-trainium",
    "TRAINIUM_SHAPE": "trn1.32xlarge",
    "TRAINIUM_MAX_NODES": "4",
    "CPU_QUEUE": "millrace-cpu",
    "CPU_SHAPE": "m7i.8xlarge",
    "CPU_MAX_NODES": "4",
    "JOB_ROLE_TOKENIZER": f"{ROLE}/tokenizer",
    "JOB_ROLE_COMPILER": f"{ROLE}/compiler",
    "JOB_ROLE_TRAINER": f"{ROLE}/trainer",
    "LOG_GROUP_TOKENIZER": "/millrace/tokenizer",
    "LOG_GROUP_COMPILER": "/millrace/compiler",
    "LOG_GROUP_TRAINER": "/millrace/trainer",
    "CAPACITY_ENDS_AT": "",
    "CHECKPOINT_GB": "157",
    "NOTICE_SECONDS": "300",
    "EXECUTION_ROLE": f"{ROLE}/secrets",
    "HF_TOKEN_SECRET": "arn:aws:secretsmanager:us-west-2:111122223333:secret:hugging-face",
    "WEBHOOK_SECRET": "arn:aws:secretsmanager:us-west-2:111122223333:secret:notices",
}


def write_config(path: Path, **changes: str) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in (VALUES | changes).items()), encoding="utf-8")
    return path


def config_of(**changes: str) -> Config:
    with TemporaryDirectory() as folder:
        return read_config(write_config(Path(folder) / "config.txt", **changes))


def job_spec_of(
    stage: Stage = "trainer",
    text: str = recipe_text(),
    arguments: tuple[str, ...] = ("--train.max_steps=5",),
    **changes: Any,
) -> JobSpec:
    fields: dict[str, Any] = {
        "stage": stage,
        "image": f"{REGISTRY}/{stage}@sha256:{DIGEST}",
        "recipe": parse_requested_recipe(text, "a file").with_arguments(*arguments),
        "attempt_seconds": 86_400,
        "nodes": 2,
        "attempts": 3,
    }
    return JobSpec(**fields | changes)
