"""A one-off container is the same on both targets; the table of subcommands has those of the stages' programs."""

from __future__ import annotations

import importlib

import pytest
import typer
from kubernetes.utils.quantity import parse_quantity

from deploy.batch.job_definition import JobSpec, read_container, render_job_definition
from deploy.client.requested_recipe import parse_requested_recipe
from images.registry import repository_of
from k8s.objects.one_off_job import OneOff, cpu_group_of, render_one_off_job
from k8s.objects.worker_group import worker_group_of
from services.common.process.command_line import StageGroup
from services.common.process.subcommands import ARTIFACTS, SUBCOMMANDS
from services.common.recipe.packed_recipe import pack_recipe
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import config_of
from tests.k8s.builders import DIGEST
from tests.k8s.rendered import Thing

LEFT_OUT = {"tokenizer": {"tokenize", "pin"}, "compiler": {"compile"}, "trainer": {"train"}}
"""Subcommands without a one-off: those that write files on a person's machine, and the stage itself."""


@pytest.mark.parametrize("stage", STAGES)
def test_the_table_has_the_subcommands_of_each_program(stage: Stage) -> None:
    app = typer.main.get_command(importlib.import_module(f"services.{stage}.command").app)
    assert isinstance(app, StageGroup)
    assert {*SUBCOMMANDS[stage]} == {*app.commands, ARTIFACTS} - LEFT_OUT[stage]


@pytest.mark.parametrize("stage", STAGES)
def test_a_one_off_gets_the_same_on_both_targets(eks: Thing, stage: Stage) -> None:
    recipe, image = parse_requested_recipe(recipe_text(), "a file"), f"millrace/{stage}@sha256:{DIGEST}"
    told = {"stage": stage, "digest": "0" * 16, "image": image, "words": ("sample", "--prompt", "If the")}
    job = render_one_off_job(
        worker_group_of(eks, stage),
        cpu_group_of(eks),
        OneOff(id="abc123", user="somebody", recipe=pack_recipe(recipe.text.encode()), seconds=3_600, **told),  # type: ignore[arg-type]
    )
    pod = job["spec"]["template"]["spec"]["containers"][0]
    spec = JobSpec(recipe=recipe, attempt_seconds=3_600, **told)  # type: ignore[arg-type]
    definition = render_job_definition(config_of(), config_of().cpu, spec)
    container = read_container(definition)

    # Batch appends to the image's entry point. Its jobs check the host's mount, where a pod waits for its claim.
    entry_point = ["python", "-m", f"services.{stage}"]
    on_batch = [word for word in [*entry_point, *container["command"]] if word != "--require-mount"]
    assert on_batch == [*pod["command"], *pod["args"]]
    assert {each["name"]: each["value"] for each in container["environment"]} == {
        each["name"]: each["value"] for each in pod["env"] if "value" in each
    }
    assert [each["name"] for each in container.get("secrets", [])] == [
        each["name"] for each in pod["env"] if "valueFrom" in each
    ]
    amounts = {each["type"]: int(each["value"]) for each in container["resourceRequirements"]}
    assert amounts["VCPU"] == int(pod["resources"]["limits"]["cpu"])
    assert amounts["MEMORY"] * 2**20 == parse_quantity(pod["resources"]["limits"]["memory"])
    assert repository_of(container["image"]) == repository_of(pod["image"])
    assert {each["containerPath"] for each in container["mountPoints"]} == {
        each["mountPath"] for each in pod["volumeMounts"]
    }
    assert definition["timeout"]["attemptDurationSeconds"] == job["spec"]["activeDeadlineSeconds"]
