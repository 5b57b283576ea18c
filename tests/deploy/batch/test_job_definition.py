"""Job definitions have the settings that decide whether a job on AWS Batch survives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.batch.job_definition import DEPLOYMENT_TAG, Request, queue_of, read_container, render_job_definition
from deploy.stage_contract import DRAIN_SECONDS
from services.common.errors import RecipeError
from services.common.recipe.packed_recipe import MAX_RECIPE_CHARACTERS
from services.common.recipe.schema import STAGES, Stage
from services.common.testing.recipes import recipe_text
from tests.deploy.batch.builders import VALUES, config_of, job_spec_of


def definition_of(stage: Stage = "trainer", is_compiler_on_trainium: bool = False, **changes: Any) -> Request:
    config = config_of(**changes.pop("config", {}))
    pool = queue_of(config, stage, is_compiler_on_trainium)
    return render_job_definition(config, pool, job_spec_of(stage, **changes))


def test_every_stage_is_a_multi_node_job_of_any_number_of_nodes_that_retries_a_lost_host_and_75() -> None:
    assert {definition_of(stage, nodes=1)["type"] for stage in STAGES} == {"multinode"}
    definition = definition_of(nodes=3, attempts=4, attempt_seconds=7_200)
    nodes = definition["nodeProperties"]
    assert (nodes["numNodes"], nodes["mainNode"], len(nodes["nodeRangeProperties"])) == (3, 0, 1)
    assert nodes["nodeRangeProperties"][0]["targetNodes"] == "0:"  # one with an end would fix the number
    assert definition["timeout"] == {"attemptDurationSeconds": 7_200}
    assert definition["retryStrategy"] == {
        "attempts": 4,
        "evaluateOnExit": [
            {"onStatusReason": "Host EC2*", "action": "RETRY"},
            {"onExitCode": "75", "action": "RETRY"},
            {"onExitCode": "*", "action": "EXIT"},
        ],
    }


@pytest.mark.parametrize(("shape", "cards"), [("trn1.32xlarge", 8), ("trn2.48xlarge", 16)])
def test_a_container_has_its_node_s_devices_and_may_pin_memory_and_share_it(shape: str, cards: int) -> None:
    container = read_container(definition_of(config={"TRAINIUM_SHAPE": shape}))
    devices = container["linuxParameters"]["devices"]
    paths = {each["hostPath"] for each in devices}
    assert paths == {f"/dev/neuron{n}" for n in range(16)} | {f"/dev/infiniband/uverbs{n}" for n in range(cards)}
    assert {tuple(each["permissions"]) for each in devices} == {("READ", "WRITE", "MKNOD")}
    assert "devices" not in read_container(definition_of("tokenizer"))["linuxParameters"]
    limits = {each["name"]: each["hardLimit"] for each in container["ulimits"]}
    assert (limits["memlock"], limits["nofile"], limits["stack"]) == (-1, 1_048_576, 64 * 2**20)
    assert container["linuxParameters"]["initProcessEnabled"]
    assert container["linuxParameters"]["sharedMemorySize"] >= 65_536
    assert container["logConfiguration"]["options"]["awslogs-group"] == "/millrace/trainer"
    assert container["jobRoleArn"].endswith("role/trainer")


@pytest.mark.parametrize("stage", STAGES)
def test_a_secret_reaches_the_stages_that_use_it_by_its_name_alone(stage: Stage) -> None:
    token = {"name": "HF_TOKEN", "valueFrom": VALUES["HF_TOKEN_SECRET"]}
    webhook = {"name": "MILLRACE_WEBHOOK", "valueFrom": VALUES["WEBHOOK_SECRET"]}
    container = read_container(definition_of(stage))
    assert container["secrets"] == ([token, webhook] if stage == "tokenizer" else [webhook])
    assert container["executionRoleArn"] == VALUES["EXECUTION_ROLE"]
    assert not {"HF_TOKEN", "MILLRACE_WEBHOOK"} & {each["name"] for each in container["environment"]}
    without = definition_of(stage, config={"HF_TOKEN_SECRET": "", "WEBHOOK_SECRET": "", "EXECUTION_ROLE": ""})
    assert not {"secrets", "executionRoleArn"} & read_container(without).keys()


@pytest.mark.parametrize(
    ("stage", "of_the_machines", "told"),
    [
        ("trainer", "1608", 1608),
        ("trainer", "60", DRAIN_SECONDS["trainer"]),
        ("trainer", "", DRAIN_SECONDS["trainer"]),
        ("tokenizer", "1608", DRAIN_SECONDS["tokenizer"]),
    ],
)
def test_a_stage_is_told_of_its_notice(stage: Stage, of_the_machines: str, told: int) -> None:
    """A trainer's is as long as the machines of the stack allow it."""
    definition = definition_of(stage, config={"NOTICE_SECONDS": of_the_machines})
    variables = {each["name"]: each["value"] for each in read_container(definition)["environment"]}
    assert variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(told)
    assert ("FI_PROVIDER" in variables) == (stage == "trainer")


def test_a_recipe_that_is_too_long_for_a_variable_is_refused() -> None:
    with pytest.raises(RecipeError, match="16,384"):
        definition_of(text=recipe_text() + "".join(f"# {number**9}\n" for number in range(4_000)))


def test_what_runs_the_same_is_known_again() -> None:
    tags = [
        definition_of(**changes)["tags"][DEPLOYMENT_TAG]
        for changes in (
            {},
            {},
            {"nodes": 3},
            {"arguments": ()},
            {"image": "other@sha256:1"},
            {"text": recipe_text() + "# x"},
        )
    ]
    assert tags[0] == tags[1]
    assert len(set(tags)) == 5


@pytest.mark.parametrize("stage", STAGES)
def test_a_definition_with_the_longest_recipe_is_no_longer_than_batch_takes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 KiB, by its service quotas; a node of trn2 has the most devices to name."""
    monkeypatch.setattr("deploy.batch.job_definition.pack_recipe", lambda content: "x" * MAX_RECIPE_CHARACTERS)
    definition = definition_of(stage, config={"TRAINIUM_SHAPE": "trn2.48xlarge"}, nodes=4)
    assert len(json.dumps(definition)) <= 24 * 1024
