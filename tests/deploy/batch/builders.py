"""Small real objects for the tests of this folder: an account's config.txt, and a deployment."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.batch.config import Config, read_config
from deploy.batch.job_definition import JobSpec
from deploy.client.one_off_request import OneOffRequest
from deploy.client.requested_recipe import parse_requested_recipe
from images.platforms import REPOSITORY
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.recipes import recipe_text

DIGEST = "0" * 64
REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com/millrace"
ROLE = "arn:aws:iam::111122223333:role"
SECRET = "arn:aws:secretsmanager:us-west-2:111122223333:secret"
SMALL = parse_requested_recipe(recipe_text(), "a file")


def read_written_config() -> str:
    """The config.txt that `terraform test` expects of the stack."""
    text = (REPOSITORY / "infra/stacks/batch/tests/stack.tftest.hcl").read_text(encoding="utf-8")
    expected = text[text.index("output.config == ") : text.index("error_message")]
    return "".join(f"{line}\n" for line in re.findall(r'^ +"([A-Z_]+=.*)",$', expected, re.MULTILINE))


VALUES = dict(line.split("=", 1) for line in read_written_config().splitlines()) | {
    **{f"JOB_ROLE_{stage.upper()}": f"{ROLE}/{stage}" for stage in STAGES},
    "NOTICE_SECONDS": "300",
    "EXECUTION_ROLE": f"{ROLE}/secrets",
    "HF_TOKEN_SECRET": f"{SECRET}:hugging-face",
    "WEBHOOK_SECRET": f"{SECRET}:notices",
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


def one_off_request(*words: str, stage: Stage = "trainer", **changes: Any) -> OneOffRequest:
    fields: dict[str, Any] = {"recipe": SMALL}
    return OneOffRequest(stage, words or ("summary",), **fields | changes)
