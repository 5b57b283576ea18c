"""The commands that the pages list, from an empty account to an exported model, are complete and fit together."""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

import infra.__main__
from deploy.batch.resolved_job import DEFAULT_RECIPE as NEURON_RECIPE
from deploy.client.instance_type import check_instance_type
from deploy.client.one_off_request import OneOffRequest
from deploy.client.request import DeployRequest
from images.platforms import REPOSITORY
from infra.tests.service_models import service_models
from k8s.client.compile_tasks import check_trace
from k8s.client.resolved_deployment import resolve
from k8s.objects.worker_group import worker_group_of
from services.common.recipe.schema import STAGES
from tests.contract.agreements import read_settings
from tests.deploy.batch.cloud import TAG, simulated_account
from tests.deploy.typed import request_of
from tests.k8s.builders import DIGEST
from tests.k8s.rendered import OVERLAYS, Thing

__all__ = ["service_models"]
REGISTRY = "111122223333.dkr.ecr.us-west-2.amazonaws.com"

Target = Literal["eks", "batch"]
PAGES: dict[Target, Path] = {"eks": REPOSITORY / "infra/README.md", "batch": REPOSITORY / "docs/operations/batch.md"}


@dataclass(frozen=True)
class Typed:
    """A line that a reader types: for `make`, its target and its variables."""

    line: str
    target: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def read_road(target: Target) -> list[Typed]:
    """The commands of the page's list, without their comments."""
    lines = PAGES[target].read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"    cp infra/stacks/{target}/"))
    end = next(number for number, line in enumerate(lines[begin:], start=begin) if not line.startswith("    "))
    return [_read(line.strip().partition("  #")[0].rstrip()) for line in lines[begin:end]]


def _read(line: str) -> Typed:
    words = shlex.split(line)
    if words[0] != "make":
        return Typed(line)
    return Typed(line, words[1], dict(word.split("=", 1) for word in words[2:]))


def deployments(target: Target) -> list[Typed]:
    return [typed for typed in read_road(target) if typed.target == "deploy-stage"]


def read_request(typed: Typed) -> DeployRequest:
    """Return the deploy tool's request for a typed command."""
    request: DeployRequest = request_of(typed.target, typed.variables)
    return request


@pytest.mark.parametrize(
    ("target", "commands"), [("eks", infra.__main__.NEXT_ON_EKS), ("batch", infra.__main__.NEXT_ON_BATCH)]
)
def test_the_commands_that_infra_up_prints_follow_it_on_the_page(target: Target, commands: str) -> None:
    printed = commands.format(region="us-west-2", name="millrace", registry=REGISTRY, variant="neuron").splitlines()
    lines = [typed.line for typed in read_road(target)]
    begin = next(number for number, line in enumerate(lines, start=1) if line.startswith("make infra-up"))
    assert [line.strip() for line in printed] == lines[begin : begin + len(printed)]


@pytest.mark.parametrize("target", PAGES)
def test_the_stages_run_in_order_and_what_was_made_is_exported_and_taken_down(target: Target) -> None:
    typed = [each for each in read_road(target) if each.target]
    assert [each.variables["STAGE"] for each in deployments(target)] == list(STAGES)
    assert [each.target for each in typed[-2:]] == ["stage-run", "infra-down"]


def read_export(target: Target) -> OneOffRequest:
    """Return the request of the export, the last step before infra-down, for an image that has been pushed."""
    [typed] = [each for each in read_road(target) if each.target == "stage-run"]
    request: OneOffRequest = request_of(typed.target, typed.variables)
    return request


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_the_eks_road_fits_its_overlay(eks: Thing, stage: str) -> None:
    """The overlay supplies recipe, nodes and the compiler's device, because the road's commands set neither."""
    [typed] = [each for each in deployments("eks") if each.variables["STAGE"] == stage]
    group = worker_group_of(copy.deepcopy(eks), stage)
    api: Any = None  # an image that has a digest is looked up nowhere

    deployment, recipe = resolve(api, group, replace(read_request(typed), tag=f"a/b@sha256:{DIGEST}"))

    assert (recipe.outline.name, recipe.outline.parallel.device) == ("llama2-7b-trn1", "xla")
    assert check_trace(group, recipe.outline) == ""
    assert check_instance_type(stage, recipe.outline, group.instance_type, "CHANGE") == ""
    assert deployment.nodes == {"tokenizer": 1, "compiler": 1, "trainer": 4}[stage]
    assert deployment.nodes <= group.spec["maxReplicas"]


def test_the_cost_is_held_against_the_recipe_that_both_targets_deploy() -> None:
    of_the_overlay = REPOSITORY / read_settings(OVERLAYS["eks"] / "settings.env")["RECIPE"]

    assert of_the_overlay == REPOSITORY / NEURON_RECIPE == infra.__main__.RECIPE


def test_the_stages_of_the_batch_road_are_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    """Every stage is submitted as typed, to its queue, in a simulated account."""
    with simulated_account() as cloud:
        for typed in deployments("batch"):
            request = replace(read_request(typed), tag=TAG, is_followed=False)
            assert cloud.target.deploy(request, None) == 0
            cloud.move("SUCCEEDED", 0)
        assert cloud.target.run_one_off(replace(read_export("batch"), is_followed=False), None) == 0
        queues = [job["jobQueue"] for job in cloud.submitted]
    said = capsys.readouterr().out

    assert queues == ["millrace-cpu", "millrace-trainium", "millrace-trainium", "millrace-cpu"]
    assert "export llama2-7b --output export/llama2-7b\n" in said
    assert said.count("llama2-7b-trn1") >= len(STAGES)
    assert "4 x trn1.32xlarge x $21.50 = $86.00 an hour" in said
