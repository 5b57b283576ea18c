"""The deploy tool uses what `infra/stacks/batch` makes: the stack's HCL against the code of deploy/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.batch.config import CONFIG, SECRETS, Config, read_config
from deploy.batch.job_definition import HOST_FOLDERS, queue_of, read_container, render_job_definition
from deploy.client.requested_recipe import read_requested_recipe
from deploy.stage_contract import DRAIN_SECONDS, ROOT, SCRATCH, find_contract
from images.platforms import REPOSITORY
from infra import __main__ as infra_commands
from infra.apply.variables import read_variables
from services.common.launch.batch.node import ROOT_MARKER
from services.common.process.shutdown import CHECKPOINTS_PER_GRACE_PERIOD
from services.common.recipe.schema import STAGES
from tests.containers import IMAGE_USER
from tests.contract.agreements import plain, read_hcl
from tests.deploy.batch.builders import job_spec_of, read_written_config

STACK = REPOSITORY / "infra/stacks/batch"
MODULE = REPOSITORY / "infra/modules/batch"
KEYS = tuple(name.upper() for name in Config.model_fields)
PLACES = KEYS[:7]


def locals_of(path: Path) -> dict[str, Any]:
    return {name: value for block in plain(read_hcl(path)["locals"]) for name, value in block.items()}


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return locals_of(STACK / "common.tf") | locals_of(STACK / "main.tf")


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    return locals_of(MODULE / "main.tf")


@pytest.fixture(scope="module")
def rendered() -> str:
    return read_written_config()


@pytest.fixture
def config(rendered: str, tmp_path: Path) -> Config:
    path = tmp_path / "config.txt"
    path.write_text(rendered, encoding="utf-8")
    return read_config(path)


def test_the_file_that_the_stack_writes_is_the_one_that_deployments_read(rendered: str, config: Config) -> None:
    assert (config.trainium.name, config.cpu.name) == ("millrace-trainium", "millrace-cpu")
    assert config.log_groups == {stage: f"/millrace/{stage}" for stage in STAGES}
    lines = re.findall(r'^ +\["([A-Z_]+)", ', (STACK / "outputs.tf").read_text(encoding="utf-8"), re.MULTILINE)
    assert lines == [line.partition("=")[0] for line in rendered.splitlines()]
    assert set(lines) == set(KEYS)
    assert tuple(lines[: len(PLACES)]) == PLACES
    assert infra_commands.CONFIG == CONFIG


def test_the_secrets_of_a_container_are_those_that_its_execution_role_reads() -> None:
    [names] = re.findall(r"secrets = compact\(\[(.*)\]\)", (MODULE / "identities.tf").read_text(encoding="utf-8"))
    outputs = (STACK / "outputs.tf").read_text(encoding="utf-8")
    given = {key: re.findall(rf'^ +\["{key}", (var\.\w+) == null', outputs, re.MULTILINE) for key in SECRETS}
    assert given == {key: [name] for key, name in zip(SECRETS, names.split(", "), strict=True)}


def test_what_is_there_already_has_the_same_keys_on_both_sides(stack: dict[str, Any]) -> None:
    assert tuple(stack["places"]) == PLACES
    given = (STACK / "tests/configs/given.txt").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^([A-Z_]+)=", given, re.MULTILINE)) == PLACES


def test_every_stage_has_its_role_log_group_and_repository(stack: dict[str, Any]) -> None:
    assert stack["stages"] == list(STAGES)
    for stage in STAGES:
        assert find_contract(stage, None).repository == f"{stack['repository_prefix']}/{stage}"


def test_a_container_has_time_for_the_longest_drain_of_a_stage(stack: dict[str, Any]) -> None:
    assert stack["least_notice_seconds"] == max(DRAIN_SECONDS.values())
    assert stack["checkpoints_per_notice"] == CHECKPOINTS_PER_GRACE_PERIOD


def test_a_checkpoint_of_every_recipe_for_trn1_fits_into_the_stop_timeout() -> None:
    outlines = [read_requested_recipe(path).outline for path in sorted((REPOSITORY / "recipes").glob("*-trn1.toml"))]
    sizes = {outline.name: outline.checkpoint_gb for outline in outlines}
    default = read_variables(None, STACK)["checkpoint_gb"]
    assert sizes
    assert all(size and size <= default for size in sizes.values()), f"{sizes} of {default}"


def test_a_node_prepares_the_folders_that_a_job_mounts(
    stack: dict[str, Any], module: dict[str, Any], config: Config
) -> None:
    assert (module["marker"], module["user"]) == (ROOT_MARKER, IMAGE_USER)
    assert module["folders"] == {"file_system": ROOT.path, "scratch": SCRATCH.path}
    assert set(module["folders"].values()) == set(HOST_FOLDERS.values())
    for stage in STAGES:
        container = read_container(render_job_definition(config, queue_of(config, stage, False), job_spec_of(stage)))
        sources = {each["host"]["sourcePath"] for each in container["volumes"]}
        assert sources == set(module["folders"].values())
